"""Lightning's plain example, in short: with_lightning.py FOLDER BACKEND+BACKEND... CHECK

Its ranks are forked, with the variables that torchrun gives them: importing Lightning takes longest of all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import tutti  # noqa: F401
from tests.ecosystem.jobs import meeting_point
from tests.ecosystem.outcomes import PORTS, RANKS, file_of


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adam(self.parameters(), lr=0.01)


def train_and_validate(backend: str, folder: Path) -> dict[str, Tensor]:
    lightning.seed_everything(3, verbose=False)
    samples = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loaders = DataLoader(samples, batch_size=8, shuffle=True), DataLoader(samples, batch_size=8)
    trainer.fit(model, *loaders)
    assert dist.get_backend() == backend
    trained = {name: value.detach().clone() for name, value in model.state_dict().items()}
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
    torch.testing.assert_close(checkpoint, trained)
    return trained | {"validation": trainer.callback_metrics["validation"]}


def work(rank: int, folder: Path, backends: list[str], check: str) -> None:
    """Be a rank of torchrun."""
    elastic = {"TORCHELASTIC_RUN_ID": "lightning", "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
    os.environ |= elastic | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_default_dtype(torch.float64)
    for backend, port in zip(backends, os.environ[PORTS].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        found = {check: globals()[check](backend, folder / backend)}
        torch.save(found, folder / file_of(backend, dist.get_rank()))
        dist.destroy_process_group()


if __name__ == "__main__":
    with meeting_point() as variables:
        os.environ |= variables
        given = Path(sys.argv[1]), sys.argv[2].split("+"), sys.argv[3]
        mp.start_processes(work, args=given, nprocs=RANKS, start_method="fork")
