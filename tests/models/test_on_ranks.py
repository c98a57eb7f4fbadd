"""Models for tokens, of ours and of Hugging Face's, on two ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from tests.contracts.training import Run, distance, train
from tutti import models
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Part, open_data
from tutti.strategies import Sync

VOCABULARY, SAMPLES = 20, 30


def opened(given: object) -> Part:
    comm = HostCommunicator.alone()
    data = open_data(given, comm, validation=0.0)
    comm.close()
    return data.train


def sentences() -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Of unequal length, each of the class that its first token says."""
    random = np.random.default_rng(0)
    tokens = [random.integers(1, VOCABULARY, random.integers(1, 9)) for _ in range(SAMPLES)]
    return tokens, np.array([one[0] % 3 for one in tokens])


def padded() -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """The same as Hugging Face's models take them."""
    tokens, classes = sentences()
    ids = np.zeros((SAMPLES, 8), np.int64)
    for row, one in zip(ids, tokens, strict=True):
        row[: len(one)] = one
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}, classes


def same_on_two_ranks(make: Callable[[], nn.Module], part: Part) -> None:
    run = Run(Sync(), model=make, data=lambda: (part, part))
    alone, both = (VirtualWorld(ranks).run(train, run)[0] for ranks in (1, 2))
    assert distance(both.weights, alone.weights) < 1e-12
    assert alone.history[1].train.loss < alone.history[0].train.loss


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gru", {"hidden": 6, "layers": 2, "bidirectional": True, "dropout": 0.2}),
        ("transformer", {"width": 8, "heads": 2, "dropout": 0.2}),
    ],
)
def test_sequences_of_unequal_length(name: str, options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        return models.build(name, (8,), 3, {"vocabulary": VOCABULARY, **options}).double()

    same_on_two_ranks(make, opened(sentences()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tiny_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.0,  # a function draws it, which knows no samples
    )
    same_on_two_ranks(lambda: transformers.BertForSequenceClassification(config).double(), opened(padded()))
