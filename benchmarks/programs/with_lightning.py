"""An ordinary program of Lightning's: torchrun --nproc-per-node 2 with_lightning.py BACKEND

Global batch 128, Adam, samples that lie in memory. Prints samples/s by model as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from time import perf_counter

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import tutti  # noqa: F401

BATCH = 128
STEPS = 200
RANKS = 2


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(128, 10))
        self.began = self.ended = 0.0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adam(self.parameters(), fused=True)

    def on_train_epoch_start(self) -> None:
        self.began = perf_counter()

    def on_train_epoch_end(self) -> None:
        self.ended = perf_counter()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    samples = TensorDataset(torch.randn(STEPS * BATCH, 1, 28, 28), torch.randint(10, (STEPS * BATCH,)))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend=sys.argv[1]),
        max_epochs=2,  # the second one is timed
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(samples, batch_size=BATCH // RANKS, shuffle=True))
    if dist.get_rank() == 0:
        print(json.dumps({"mlp, 235 k": STEPS * BATCH / (model.ended - model.began)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
