"""Published data sets: their files on this machine, and the servers that they are downloaded from."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.data.contents import Contents
from tutti.data.formats.idx import Idx
from tutti.errors import BadData
from tutti.records.files import cache_folder

IDX_FILES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Published:
    """A data set that its publisher offers as gzip-compressed IDX files.

    Attributes:
        name: of the data set, and of its folder on this machine.
        servers: addresses of folders with the files, the first to be tried first.
        sha256: of the unpacked `IDX_FILES`: so a re-packed file passes, and a changed one does not.
        labels: the classes' names.
    """

    name: str
    servers: tuple[str, ...]
    sha256: tuple[str, ...]
    labels: tuple[str, ...]

    def contents(self) -> Contents[object]:
        """Read the data set in `TUTTI_DATA/NAME`, or in the cache, into which missing files are downloaded.

        Raises:
            BadData: a file is missing and cannot be downloaded, or is not the one that was published.
        """
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


def given_folder(name: str) -> Path | None:
    """Return the folder `TUTTI_DATA/NAME`, if there is one.

    Raises:
        BadData: `TUTTI_DATA` is no folder.
    """
    given = os.environ.get("TUTTI_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise BadData(f"TUTTI_DATA is '{given}', which is no folder; correct it or unset it")
    return folder / name if (folder / name).is_dir() else None


def _unpack_from(url: str, to: str, _: object) -> None:
    """Download a gzip file and unpack it: a downloader of pooch, which checks the result."""
    import pooch

    print(f"downloading {url}", file=sys.stderr)
    with tempfile.TemporaryFile(dir=Path(to).parent) as packed:
        pooch.HTTPDownloader(timeout=30)(url, packed, None)
        packed.seek(0)
        with gzip.GzipFile(fileobj=packed) as content, Path(to).open("wb") as file:
            shutil.copyfileobj(content, file)
