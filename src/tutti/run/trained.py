"""Trained models as torch modules, from stored inputs to outputs or predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from tutti import models
from tutti.batch_last import BATCH_LAST
from tutti.data.arrays import keeping_doubles, part_columns, stored_dtype
from tutti.data.columns import Columns, Inputs, each_of, mapped
from tutti.data.formats.arrow_tables import is_frame, read_frame
from tutti.data.parts import PIXEL_MAX, Part, Scale
from tutti.data.rows import Rows
from tutti.data.structure import taken_apart
from tutti.data.tables import LIKE
from tutti.errors import BadData, BadOption
from tutti.exports.sources import load_from
from tutti.records.output_kinds import Kind, kind_of
from tutti.records.preparation import DATE, TEXT, Table, table_of
from tutti.records.run_folder import TrainedOn
from tutti.run.build import seeded
from tutti.run.config import TrainConfig
from tutti.run.evaluate import aligned, no_table, scale_seen
from tutti.run.jobs import Recipe
from tutti.run.trained_run import UNUSED, TrainedRun, find_run
from tutti.training.evaluation import evaluating
from tutti.training.losses.units import Units
from tutti.training.precision import FP32, Arithmetic
from tutti.training.prediction import PASS
from tutti.training.preflight import told_of_sequences

Array = NDArray[Any]


class Predictor(nn.Module, ABC):
    """A module that takes inputs as they are stored, and knows the meaning of its outputs."""

    def __init__(self, data: TrainedOn, kind: Kind, table: Table | None) -> None:
        super().__init__()
        # The training data, the kind of the outputs, and the columns of the inputs, if these are a table.
        self.data, self.kind, self.table = data, kind, table

    @property
    def labels(self) -> tuple[Any, ...]:
        """The names of the classes; empty if they have none."""
        return self.data.labels

    @property
    def is_double(self) -> bool:
        """True if it has 64-bit weights, so that its inputs must not be rounded either."""
        return any(parameter.dtype == torch.float64 for parameter in self.parameters())

    @abstractmethod
    def plain(self) -> PlainModel:
        """Return it as plain operations, in the precision of its weights."""

    def given(self, part: Part) -> Part:
        """Return a part in the form that the module takes."""
        return part

    def seen(self, name: str, part: Part, columns: Sequence[str], table: Table | None) -> Part:
        """Return a part of other data in the form that the module takes; see `aligned`."""
        if self.table is None:
            part = self.given(aligned(name, part, columns, self.data))
        elif table is None:
            raise no_table(self.data)
        elif table.columns != self.table.columns:
            self.take_rows_of(table)
        return replace(part, scale=Scale())

    def take_rows_of(self, table: Table) -> None:
        """Take the rows of a table whose columns have another order, or whose texts have other numbers."""
        self.table = table

    def outputs(self, inputs: object) -> Array:
        """Compute the outputs for some inputs, such as logits, some at a time.

        Args:
            inputs: an array, a tensor or nested lists, of shape (samples, ...), as they were stored in
                training: pixels from 0 to 255, other numbers as they are. Several are a dict or a tuple. Of a
                frame, the columns of the training are taken by their names; if all are numbers, an array may
                have them in the order of `table`.

        Raises:
            BadData: their shape or type differs from the training's.
        """
        with keeping_doubles(self.is_double):
            part = self._part(inputs)
        device = next(chain(self.parameters(), self.buffers()), part.stored_targets).device
        with evaluating(self), torch.no_grad():
            passes = (part.take(some)[0] for some in torch.split(torch.arange(len(part)), PASS))
            found = [FP32.forward(self, mapped(some, methodcaller("to", device))).cpu() for some in passes]
        return np.asarray(torch.cat(found))

    def _part(self, inputs: object) -> Part:
        """Return inputs as a part with meaningless targets."""
        table, missing = self.table, "mean" if self.data.fill else "error"
        if is_frame(inputs) and table is not None:
            found = read_frame(inputs, {LIKE: table.columns}, labelled=False)
            inputs, table = found.parts["train"][0], found.table
        elif is_frame(inputs) and not all(name.isdecimal() for name in self.data.columns):
            inputs = _in_order(inputs, self.data, missing)
        given = taken_apart({"given": inputs})
        several = [(given.label("given", at), one) for at, one in enumerate(given.parts["given"])]
        columns, targets, _ = part_columns(
            "given", several, None, missing if self.table is None else "prepare"
        )

        def kept(rows: Rows) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(rows[:], dtype=stored_dtype(rows)))

        each = [column.changed(kept) for column in columns]
        stored = each[0].rows if given.single else Columns(tuple(each), given.names)
        if table is not None and table is self.table:
            named = any(column.kind in (TEXT, DATE) for column in table.columns)
            if named or not given.single or each[0].rows.shape[1:] != (len(table.columns),):
                raise no_table(self.data)
        return self.seen("this call", Part(stored, torch.from_numpy(targets)), (), table)

    def probabilities(self, inputs: object) -> Array:
        """Compute the probability of each class, or of each label of 0 or 1, of shape (samples, ...).

        Args:
            inputs: as for `outputs`.

        Raises:
            BadData: as for `outputs`; or the model gives amounts.
        """
        if self.kind is Kind.REGRESSION:
            raise BadData("the model predicts numbers, which have no probabilities; ask for its predict(...)")
        return self.kind.values(self.outputs(inputs))

    def predict(self, inputs: object) -> Array:
        """Predict the class of each sample by its name, or by its number if it has none; or the amounts.

        Args:
            inputs: as for `outputs`.

        Returns:
            An array of shape (samples,), or (samples, ...) if each position has a class or a sample several
            amounts or labels.

        Raises:
            BadData: as for `outputs`.
        """
        values = self.kind.values(self.outputs(inputs))
        if self.kind is Kind.REGRESSION and self.data.classes is None:
            return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        found = self.kind.classes(values, self.data.classes)
        return np.array(self.labels)[found] if self.labels and self.data.classes else found


class PlainModel(nn.Module):
    """A trained model in plain operations, for programs: no autocast, no layout, and its scale in tensors."""

    def __init__(self, data: TrainedOn, table: Table | None, double: bool = False) -> None:
        super().__init__()
        self.data, self.table = data, table
        self._dtype = data.dtype or ("uint8" if data.mean else "float32")
        self._floats = torch.float64 if double else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one stored input."""
        return self.data.shape if self.table is None else (len(self.table.columns),)

    def example(self, samples: int) -> Tensor:
        """Make inputs of some samples: any bytes, numbers around 0, the integers 0 and 1, or any texts."""
        of = torch.Generator().manual_seed(samples)
        size = (samples, *self.shape)
        if self.table is not None:
            counts = torch.tensor([len(column.texts) or 2 for column in self.table.columns])
            found = (torch.rand(size, generator=of) * counts).floor().to(self._floats)
            found[1:, samples % len(counts)] = torch.nan
            return found
        if self._dtype == "uint8":
            return torch.randint(0, 256, size, dtype=torch.uint8, generator=of)
        if self._dtype.startswith("float"):
            return torch.randn(size, generator=of, dtype=getattr(torch, self._dtype))
        return torch.randint(0, 2, size, generator=of)


class PlainNetwork(PlainModel):
    """A trained network in plain operations; `network` takes scaled inputs."""

    def __init__(self, model: nn.Module, data: TrainedOn, double: bool, table: Table | None = None) -> None:
        super().__init__(data, table, double)
        self.network, self._arithmetic = model, Arithmetic("fp64" if double else "fp32")
        self._prepared = None if table is None else scale_seen(data, table)
        self._units = Units.of(data.preparation)
        if data.mean:
            mean, std = (torch.tensor(one, dtype=torch.float64) for one in (data.mean, data.std))
            per_channel = (1, -1) + (1,) * (len(data.shape) - 1)
            self.register_buffer("_factor", (1 / (PIXEL_MAX * std)).view(per_channel).to(self._floats))
            self.register_buffer("_offset", (-mean / std).view(per_channel).to(self._floats))
        if data.fill:
            fill = torch.tensor(data.fill, dtype=torch.float64).view(1, *data.shape)
            self.register_buffer("_fill", fill.to(self._floats))
        self._scaled, self._filled = bool(data.mean), bool(data.fill)

    @override
    def forward(self, stored: Tensor) -> Tensor:
        """Return the outputs of the network."""
        inputs = stored
        if self._scaled or self._dtype.startswith("float"):
            inputs = stored.to(self._floats)
        if self._filled:
            inputs = torch.where(inputs.isnan(), cast("Tensor", self._fill), inputs)
        if self._scaled:
            inputs = inputs * cast("Tensor", self._factor) + cast("Tensor", self._offset)
        if self._prepared is not None:
            inputs = self._prepared.apply(inputs)
        outputs = self._arithmetic.forward(self.network, inputs)
        return outputs if self._units is None else self._units.outputs(outputs)


class TrainedModel(Predictor):
    """A trained network, which scales inputs as in training.

    Args:
        config: of the training.
        data: of the training, as the network saw them.
        device: where it computes.
        model: the network, or a function that makes it, if the configuration cannot.
        table: the columns of its inputs; by default those of its training, if these are a table.

    Attributes:
        model: the network, which takes scaled inputs.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainedOn,
        device: str = "cpu",
        model: nn.Module | Callable[..., nn.Module] | None = None,
        table: Table | None = None,
    ) -> None:
        if table is None and data.preparation is not None:
            table = table_of([data.preparation])
        super().__init__(data, kind_of(config.loss, data.classes), table)
        self._scale, self._units = scale_seen(data, table), Units.of(data.preparation)
        # A machine that uses a trained model may have no C compiler.
        layout = "contiguous" if config.layout == BATCH_LAST else config.layout
        self._arithmetic = Arithmetic(config.precision, layout, device)
        with seeded(config.seed):
            found = Recipe(config).given("model") if model is None else model
            options = {} if isinstance(model, nn.Module) else config.model_options
            built = models.build(found, data.of_inputs, data.outputs, options, data.table)
        self.model = self._arithmetic.prepare(built)
        if any(map(is_lazy, chain(built.parameters(), built.buffers()))) and not data.inputs:
            # Lazy modules have their shapes, which weights must have, after a first input.
            with torch.no_grad():
                self.eval()(torch.zeros(1, *data.shape, device=device))

    @property
    def precision(self) -> str:
        """The precision of its computations."""
        return self._arithmetic.precision

    @override
    def given(self, part: Part) -> Part:
        return told_of_sequences(part, self.model)

    @override
    def take_rows_of(self, table: Table) -> None:
        super().take_rows_of(table)
        self._scale = scale_seen(self.data, table)

    @override
    def forward(self, *stored: Tensor, **named: Tensor) -> Tensor:
        """Return the outputs of the network; pass several inputs as it takes them."""
        given: Inputs = named or (stored if len(stored) > 1 else stored[0])
        inputs = self._scale.on(str(each_of(given)[0].device)).apply_to_all(given)
        outputs = self._arithmetic.forward(self.model, self._arithmetic.inputs(inputs))
        return outputs if self._units is None else self._units.outputs(outputs)

    @override
    def plain(self) -> PlainNetwork:
        if self.data.inputs:
            raise BadOption(
                "a model that takes several inputs, or sequences, cannot be exported as a program, which has "
                "one; export its weights by --to safetensors or --to dcp"
            )
        double = self.precision == "fp64"
        return PlainNetwork(self.model, self.data, double, self.table).eval()


def load(
    run: str | Path, *, trust: bool = False, model: nn.Module | Callable[..., nn.Module] | None = None
) -> TrainedModel:
    """Load the model of a run, in evaluation mode, with its scale and the names of its classes.

        model = tutti.load("runs/2026-01-31-120000-lenet-mnist")
        model.predict(images)        # array of classes by name
        model(images)                # logits, as a tensor

    No file is unpickled. A user's own model is built by the code that the run's configuration names.

    Args:
        run: the folder of a run, of a job of a farm, or one of a run's checkpoints. For an unfinished run the
            newest good checkpoint is taken, with a warning.
        trust: whether it may name code, which runs then.
        model: the network, or a function that makes it, if a Python object was trained that no name brings
            back.

    Raises:
        BadRunFolder: there is no such run, it is damaged, or it has no weights yet.
        BadOption: the file or the package of its model is gone.
        BadModel: its weights belong to another model.
        Untrusted: it names code, and no run of this user has written it.
    """
    given = set() if model is None else {"model", "model_options"}
    return load_trained(find_run(run, trust, replaced=UNUSED | given), model=model)


def load_trained(
    run: TrainedRun,
    device: str = "cpu",
    model: nn.Module | Callable[..., nn.Module] | None = None,
    warn: bool = True,
) -> TrainedModel:
    """Load the model of a run."""
    trained = TrainedModel(run.config, run.data, device, model)
    load_from(run.weights, trained.model, warn)
    return trained.eval()


def _in_order(frame: Any, data: TrainedOn, missing: str) -> object:
    """Return the columns of a frame that a model was trained on, in their order."""
    names = [*data.columns]
    if not data.dtype.startswith("float"):  # of arrays that had names
        return frame.select(names) if hasattr(frame, "select") else frame[names]
    found = read_frame(frame, {"columns": names, "missing": missing, "prepare": "off"}, labelled=False)
    return found.parts["train"][0]
