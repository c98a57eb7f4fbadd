"""CIFAR-10, from Parquet files.

Source: Krizhevsky (2009), "Learning multiple layers of features from tiny images".
"""

from __future__ import annotations

from tutti.data.builtin import given_folder
from tutti.data.contents import Contents
from tutti.data.formats import read_path
from tutti.errors import BadData
from tutti.records.files import cache_folder
from tutti.registry import part

LABELS = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@part("cifar10")
def cifar10() -> Contents[object]:
    """60,000 colour pictures of 32 x 32 pixels, in 10 classes; 10,000 of them are for the test."""
    folder = given_folder("cifar10") or cache_folder() / "cifar10"
    if not list(folder.glob("train*.parquet")):
        raise BadData(
            f"'cifar10' is not in {folder}: put train.parquet and test.parquet there, as of "
            "https://huggingface.co/datasets/uoft-cs/cifar10; or set TUTTI_DATA to another folder that has a "
            "folder cifar10"
        )
    contents = read_path(folder, {"target": "label", "columns": "img"})
    return Contents("cifar10", contents.parts, len(LABELS), LABELS)
