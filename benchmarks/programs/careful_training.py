"""The training that a careful user of PyTorch writes, in one process with all threads. Prints a line of JSON.

    python careful_training.py DATA.npz --model lenet --batch-size 64 --epochs 6 --lr 0.005 --target 0.99

Inputs are scaled once, beforehand. Batches come from a DataLoader: of single samples in this process or in
workers, or of whole batches by a BatchSampler, which calls the data set once for each. The optimizer is
torch's fused one, and the test part is evaluated after each epoch, in inference mode, in batches of 512.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tutti import models

FEEDINGS = ("in-process", "workers", "whole-batches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--updates", type=int, help="make only so many, and evaluate nothing")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--target", type=float, default=1.0, help="accuracy on the test part")
    parser.add_argument("--flip-and-crop", action="store_true")
    parser.add_argument("--feeding", choices=FEEDINGS, default=FEEDINGS[0])
    print(json.dumps(train(parser.parse_args())))


def train(args) -> dict[str, object]:
    torch.manual_seed(0)
    arrays = np.load(args.data)
    mean, std = moments(arrays["x_train"])
    samples = TensorDataset(scaled(arrays["x_train"], mean, std), torch.from_numpy(arrays["y_train"]))
    held_out = None
    if args.updates is None:
        held_out = scaled(arrays["x_val"], mean, std), torch.from_numpy(arrays["y_val"])
    model = models.build(args.model, tuple(samples.tensors[0].shape[1:]), 10, {})
    kinds = {"adam": (torch.optim.Adam, {}), "sgd": (torch.optim.SGD, {"momentum": 0.9})}
    kind, options = kinds[args.optimizer]
    optimizer = kind(model.parameters(), lr=args.lr, fused=True, **options)
    loader = loader_of(samples, args.batch_size, args.feeding)
    updates = args.updates or args.epochs * len(loader)
    schedule = OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates)
    loss = nn.CrossEntropyLoss()
    seen, made, training_s, accuracies = 0, 0, 0.0, []
    began = perf_counter()
    while made < updates and (not accuracies or accuracies[-1] < args.target):
        model.train()
        epoch_began = perf_counter()
        for inputs, targets in loader:
            if args.flip_and_crop:
                inputs = flipped_and_cropped(inputs)
            loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            seen, made = seen + len(inputs), made + 1
            if made == updates:
                break
        training_s += perf_counter() - epoch_began
        if held_out is not None:
            accuracies.append(accuracy(model, *held_out))
    return {
        "samples_per_s": seen / training_s,
        "seconds": perf_counter() - began,
        "accuracies": accuracies,
        "updates": made,
    }


def loader_of(samples: TensorDataset, batch_size: int, feeding: str) -> DataLoader:
    if feeding == "whole-batches":
        sampler = BatchSampler(RandomSampler(samples), batch_size, drop_last=False)
        return DataLoader(samples, sampler=sampler, batch_size=None)
    workers = {"num_workers": 2, "persistent_workers": True} if feeding == "workers" else {}
    return DataLoader(samples, batch_size, shuffle=True, **workers)


def moments(pixels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, of pixels from 0 to 1."""
    some = torch.from_numpy(pixels[::10]).float() / 255
    return some.mean((0, 2, 3), keepdim=True), some.std((0, 2, 3), keepdim=True)


def scaled(pixels: np.ndarray, mean: Tensor, std: Tensor) -> Tensor:
    return (torch.from_numpy(pixels).float() / 255).sub_(mean).div_(std)


def flipped_and_cropped(images: Tensor) -> Tensor:
    """Mirror half of the images; cut each, padded by 4 pixels, to its size at a random place."""
    count, _, height, width = images.shape
    images = torch.where(torch.rand(count, 1, 1, 1) < 0.5, images.flip(3), images)
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(9, (count, 1)), torch.randint(9, (count, 1))
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    each = torch.arange(count)[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@torch.inference_mode()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    right = 0
    for some, labels in zip(inputs.split(512), targets.split(512), strict=True):
        right += int((model(some).argmax(1) == labels).sum())
    return right / len(targets)


if __name__ == "__main__":
    main()
