"""MNIST and Fashion-MNIST.

Sources: LeCun, Bottou, Bengio, Haffner (1998), "Gradient-based learning applied to document recognition";
Xiao, Rasul, Vollgraf (2017), "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms".
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.data.builtin import given_folder
from tutti.data.contents import Contents
from tutti.data.formats.idx import Idx
from tutti.errors import BadData
from tutti.records.files import cache_folder
from tutti.registry import part

IDX_FILES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Published:
    """A data set that its publisher offers as gzip-compressed IDX files."""

    name: str  # of the data set, and of its folder on this machine
    servers: tuple[str, ...]  # addresses of folders with the files, in the order in which to try them
    # of the unpacked `IDX_FILES`: a re-packed file passes, and a changed one does not
    sha256: tuple[str, ...]
    labels: tuple[str, ...]  # the classes' names

    def contents(self) -> Contents[object]:
        """Read the data set in `TUTTI_DATA/NAME`, or in the cache, to which missing files are downloaded."""
        parts = Idx.read(given_folder(self.name) or self.downloaded(), {}).parts
        return Contents(self.name, parts, len(self.labels), self.labels)

    def downloaded(self) -> Path:
        """Return the folder of the cache that has the `IDX_FILES`, each whole and checked."""
        folder = cache_folder() / self.name
        for file, sha256 in zip(IDX_FILES, self.sha256, strict=True):
            if not (folder / file).is_file():
                self._download(file, sha256, folder)
        return folder

    def _download(self, file: str, sha256: str, folder: Path) -> None:
        """Put a file into a folder, whole and checked, or not at all; other processes may do the same."""
        # Imported here because only a download needs it: it would slow every start.
        import pooch

        pooch.get_logger().setLevel("WARNING")
        failures = []
        for server in self.servers:
            url = f"{server}{file}.gz"
            try:
                pooch.retrieve(url, f"sha256:{sha256}", file, folder, downloader=_unpack_from)
            except (OSError, EOFError, ValueError, zlib.error) as error:
                failures.append(f"  {url}: {str(error)[:300]}")
            else:
                (folder / file).chmod(0o644)
                return
        tried = "\n".join(failures)
        files = ", ".join(f"{name}.gz" for name in IDX_FILES)
        raise BadData(
            f"'{self.name}' could not be downloaded:\n{tried}\nto go on without: put its files ({files}) "
            f"into FOLDER/{self.name}/ and set TUTTI_DATA=FOLDER, or use '--data digits'"
        )


def _unpack_from(url: str, to: str, _: object) -> None:
    """Download a gzip file and unpack it: a downloader of pooch, which checks the result."""
    import pooch

    print(f"downloading {url}", file=sys.stderr)
    with tempfile.TemporaryFile(dir=Path(to).parent) as packed:
        pooch.HTTPDownloader(timeout=30)(url, packed, None)
        packed.seek(0)
        with gzip.GzipFile(fileobj=packed) as content, Path(to).open("wb") as file:
            shutil.copyfileobj(content, file)


MNIST = Published(
    name="mnist",
    servers=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    sha256=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    labels=tuple(str(digit) for digit in range(10)),
)

FASHION_MNIST = Published(
    name="fashion-mnist",
    servers=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
    ),
    sha256=(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    labels=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
        "Ankle boot",
    ),
)  # fmt: skip


@part("mnist")
def mnist() -> Contents[object]:
    """70,000 handwritten digits of 28 x 28 pixels; 10,000 of them are for the test."""
    return MNIST.contents()


@part("fashion-mnist")
def fashion_mnist() -> Contents[object]:
    """70,000 pictures of clothes of 28 x 28 pixels; 10,000 of them are for the test."""
    return FASHION_MNIST.contents()
