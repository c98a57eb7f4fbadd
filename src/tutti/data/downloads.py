"""Published data sets: their files on this machine, and the servers that they are downloaded from."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from tutti.errors import BadData

SCHEMES: Final = ("https",)
"""The schemes that a file may be downloaded by."""

MOST_BYTES: Final = 64 << 20
"""The largest download: no file of a published data set has half of it."""

MOST_UNPACKED_BYTES: Final = 1 << 30
"""The most that a downloaded file may hold when it is unpacked."""

MOST_S: Final = 600.0
"""The longest download of a file, in seconds."""


@dataclass(frozen=True)
class Published:
    """A data set that its publisher offers as files.

    Attributes:
        servers: addresses of folders with the files, the first to be tried first.
        files: the names of the files, and the SHA-256 of what each holds when unpacked.
    """

    servers: tuple[str, ...]
    files: dict[str, str]


IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

PUBLISHED = {
    "mnist": Published(
        servers=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        files=dict(
            zip(
                IDX_FILES,
                (
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                strict=True,
            )
        ),
    ),
    "fashion-mnist": Published(
        servers=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        ),
        files=dict(
            zip(
                IDX_FILES,
                (
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
                strict=True,
            )
        ),
    ),
}
"""The SHA-256 is that of the unpacked content, so that a re-packed file passes and a changed one does not."""


def published_files(name: str) -> dict[str, Path]:
    """Return the files of a published data set on this machine, by name; download what is missing.

    They are looked for in `TUTTI_DATA/NAME` (if that folder exists it must hold all of them, packed or not),
    then in the cache, `TUTTI_CACHE` or `~/.cache/tutti`.

    Raises:
        BadData: a file is missing and cannot be downloaded, or what was downloaded is not what was published.
    """
    given = _given_folder(name)
    if given is not None:
        return {file: _given_file(given, file) for file in PUBLISHED[name].files}
    cache = cache_folder() / name
    found = {}
    for file in PUBLISHED[name].files:
        found[file] = cache / file
        if not found[file].is_file():
            _download(name, file, found[file])
    return found


def cache_folder() -> Path:
    """Return the folder of downloads: `TUTTI_CACHE`, or `tutti` in the user's cache folder."""
    own = os.environ.get("TUTTI_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tutti"


def _given_folder(name: str) -> Path | None:
    given = os.environ.get("TUTTI_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise BadData(f"TUTTI_DATA is '{given}', which is no folder; correct it or unset it")
    return folder / name if (folder / name).is_dir() else None


def _given_file(folder: Path, file: str) -> Path:
    for path in (folder / file, folder / file.removesuffix(".gz")):
        if path.is_file():
            return path
    there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise BadData(
        f"{folder} has no {file} (nor is it there unpacked); it has: {there}; add it or unset TUTTI_DATA"
    )


def _download(name: str, file: str, to: Path) -> None:
    """Put a file into the cache, whole and checked, or not at all; others may do the same meanwhile."""
    expected, failures = PUBLISHED[name].files[file], []
    for server in PUBLISHED[name].servers:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            number, path = tempfile.mkstemp(prefix=f".{file}-", dir=to.parent)
            os.close(number)
        except OSError as error:
            raise BadData(
                f"'{name}' cannot be downloaded to {to.parent}: {error.strerror}; set TUTTI_CACHE to a "
                f"folder that can be written"
            ) from error
        part = Path(path)
        try:
            _fetch(server + file, part)
            found = _content_sha256(part)
            if found == expected:
                part.chmod(0o644)
                part.replace(to)
                return
            failures.append(f"{server + file}: its content has SHA-256 {found}, expected {expected}")
        except (OSError, ValueError, EOFError, zlib.error) as error:
            failures.append(f"{server + file}: {_cause(error)}")
        finally:
            part.unlink(missing_ok=True)
    tried = "\n".join(f"  {failure}" for failure in failures)
    files = ", ".join(PUBLISHED[name].files)
    raise BadData(
        f"'{name}' could not be downloaded:\n{tried}\n"
        f"to go on without: put its files ({files}) into FOLDER/{name}/ and set TUTTI_DATA=FOLDER, "
        f"or use '--data digits'"
    )


def _cause(error: BaseException) -> str:
    """Return the innermost error's message: requests wraps errors in others, and quotes them all."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _fetch(url: str, to: Path) -> None:
    """Download a file.

    Raises:
        OSError, ValueError: that failed, it is too large or takes too long, or is not to be had by HTTPS.
    """
    # Imported here because only a download needs them: they would slow every start.
    import pooch

    from tutti.data.progress import DownloadBar, DownloadLimits

    def refuse_detour(answer: Any, *_: object, **__: object) -> None:
        if answer.is_redirect:
            _refuse_open(urljoin(answer.url, answer.headers["location"]))

    _refuse_open(url)
    limits = DownloadLimits(MOST_BYTES, MOST_S)
    with DownloadBar(f"{url.rsplit('/', 1)[-1]} from {urlsplit(url).netloc}", limits) as bar:
        # pooch reports failures as requests' exceptions, which are OSErrors, or as ValueError.
        fetch = pooch.HTTPDownloader(progressbar=bar, timeout=30, hooks={"response": refuse_detour})
        fetch(url, str(to), None)


def _refuse_open(url: str) -> None:
    """Refuse an address that others could read along with, or answer for."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"{url} is not to be had by {' or '.join(SCHEMES)}, but by {scheme or 'nothing'}")


def _content_sha256(path: Path) -> str:
    """The SHA-256 of what a gzip file holds.

    Raises:
        ValueError: that is too much.
    """
    found, left = hashlib.sha256(), MOST_UNPACKED_BYTES
    with gzip.open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"it holds more than {MOST_UNPACKED_BYTES:,} bytes when it is unpacked")
    return found.hexdigest()
