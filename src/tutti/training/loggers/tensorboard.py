"""Event files for TensorBoard, in the folder `tensorboard` of the run folder.

`tensorboard --logdir runs` shows all runs in `runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import TENSORBOARD
from tutti.registry import part
from tutti.training.loggers import Logger, evaluation_figures, figures_of, hyper_parameters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@part("tensorboard")
class TensorBoard(Logger):
    """An event file: the configuration, the figures of each epoch and those of the test part."""

    _writer: SummaryWriter | None = None
    _step = 0

    @classmethod
    def needs(cls) -> Sequence[str]:
        """Return the package that it needs."""
        return ("tensorboard",)

    def begin(self, config: Json) -> None:
        """Write the configuration."""
        from torch.utils.tensorboard import SummaryWriter

        self._parameters = hyper_parameters(config)
        self._writer = SummaryWriter(str(self._folder.path / TENSORBOARD))
        rows = [f"| {name} | {value} |" for name, value in self._parameters.items()]
        self._writer.add_text("configuration", "\n".join(["| option | value |", "|---|---|", *rows]))
        self._writer.flush()

    def epoch(self, record: EpochRecord) -> None:
        """Write the figures of the epoch."""
        self._step = record.step
        self._write(figures_of(record))

    def end(self, summary: Summary | None) -> None:
        """Write the hyper-parameters beside the figures of the test part, and close the file."""
        if self._writer is None:
            return
        test = evaluation_figures("test", summary.test if summary is not None else None)
        self._writer.add_hparams(self._parameters, test, run_name=".", global_step=self._step)
        self._writer.close()

    def _write(self, figures: dict[str, float]) -> None:
        assert self._writer is not None, "a logger begins first"
        for name, value in figures.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()
