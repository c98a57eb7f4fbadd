"""Factories of a user's own."""

from __future__ import annotations

from torch import nn


def fitted(shape: tuple[int, ...], outputs: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.Linear(width, outputs))


def fixed() -> nn.Module:
    return nn.Linear(3, 2)


def needy(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))


def wrong() -> str:
    return "a model"


class Own(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, outputs)


built = nn.Linear(3, 2)
number = 3
