"""Data at an address (s3://, gs://, https://, ...), which each host copies into its cache once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from tutti.errors import BadData, BadOption
from tutti.records.files import cache_folder, locked_file, replace_shared_file

SCHEMES: Final = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "hdfs": "pyarrow",
    "file": "",
    "memory": "",
}
"""The schemes of addresses, and the packages that they need beside fsspec."""

_AT_ONCE: Final = 4
_MANIFEST: Final = "copied.json"
_LOCK: Final = "lock"
_MARKS: Final = (
    *("ETag", "etag", "md5Hash", "content_md5", "mtime"),
    *("LastModified", "last_modified", "updated", "modified", "created"),
)
"""Facts that stores give of a file, of which any tells another content of the same size."""


def is_remote(data: object) -> bool:
    """Tell whether data are at an address, such as 's3://bucket/folder'."""
    return isinstance(data, str) and "://" in data


def check_address(url: str) -> None:
    """Refuse addresses of an unknown scheme.

    Raises:
        BadOption: the message lists those that there are.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise BadOption(f"{url} begins with {scheme}://; data come by {', '.join(SCHEMES)}, or from a path")


def local_copy(data: object) -> object:
    """Return the path of a copy on this host if data are at an address, else the data themselves.

    What is there already, in the size and of the time that the address says, is not copied again. Of several
    processes one copies, and the others wait for it.

    Raises:
        BadData: the files cannot be read, or there is no room for them.
        BadOption: the address is of an unknown scheme, or a package is missing.
    """
    if not isinstance(data, str) or not is_remote(data):
        return data
    check_address(data)
    name = _name_of(data)
    place = cache_folder() / "remote" / hashlib.sha256(data.encode()).hexdigest()[:16]
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadData(
            f"{data} cannot be copied to {place}: {error.strerror}; set TUTTI_CACHE to a folder that can be "
            "written"
        ) from error
    with locked_file(place / _LOCK):
        _bring(data, place, name)
    return place / name


def _name_of(url: str) -> str:
    """Return the name of the copy of an address: its last one, which has the ending of a file."""
    split = urlsplit(url)
    # Only https has queries: elsewhere # and ? are parts of names.
    name = PurePosixPath(split.path if split.scheme == "https" else url.partition("://")[2]).name
    return "data" if name in ("", "..", _MANIFEST, _LOCK) else name


def _bring(url: str, place: Path, name: str) -> None:
    """Make the copy of an address the same as what is there."""
    manifest = place / _MANIFEST
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(manifest.read_text()))
    try:
        system, found = _listed(url, name)
    except (ImportError, BadOption):
        raise
    except Exception as error:  # Each store has errors of its own.
        if known:
            print(
                f"tutti: warning: {url} cannot be read ({_said(error)}); its copy in {place} is used",
                file=sys.stderr,
            )
            return
        raise BadData(f"{url} cannot be read: {_said(error)}") from error
    marks: dict[str, list[Any]] = {to: [entry.get("size"), _mark(entry)] for to, (_, entry) in found.items()}
    wanted = {
        to: path for to, (path, _) in found.items() if not _is_copied(place / to, marks[to], known.get(to))
    }
    for to in known.keys() - marks.keys():
        (place / to).unlink(missing_ok=True)
    needed = sum(int(marks[to][0] or 0) for to in wanted)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise BadData(
            f"{url} has {needed / 1e9:.1f} GB that are not in {place} yet, and {free / 1e9:.1f} GB are free "
            "there; set TUTTI_CACHE to a folder on a larger disk"
        )
    if wanted:
        print(f"copying {len(wanted):,} files, {needed / 1e9:.2f} GB, from {url} to {place}", file=sys.stderr)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        copies = [pool.submit(_copy, system, path, place / to, marks[to][0]) for to, path in wanted.items()]
        for (to, path), copy in zip(wanted.items(), copies, strict=True):
            try:
                copy.result()
            except Exception as error:
                for other in copies:
                    other.cancel()
                raise BadData(f"{path} of {url} cannot be copied to {place / to}: {_said(error)}") from error
            known[to] = marks[to]
            replace_shared_file(manifest, json.dumps(known).encode())
    replace_shared_file(manifest, json.dumps(marks).encode())


def _listed(url: str, name: str) -> tuple[Any, dict[str, tuple[str, Mapping[str, Any]]]]:
    """Return the store, and its files by their paths in the copy, with what it says about them."""
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise BadOption(f"{scheme}:// needs another package: pip install {SCHEMES[scheme]}") from error
    if system.isfile(root):
        return system, {name: (root, system.info(root))}
    entries = system.find(root, detail=True)
    found = {}
    for path, entry in entries.items():
        inner = PurePosixPath(path).relative_to(PurePosixPath(root)) if scheme != "https" else None
        inner = inner or PurePosixPath(urlsplit(path).path).relative_to(PurePosixPath(urlsplit(root).path))
        if ".." in inner.parts or inner.is_absolute():
            raise BadData(f"{url} has a file {path}, which lies outside of it")
        found[str(PurePosixPath(name) / inner)] = path, entry
    if not found:
        raise BadData("there are no files")
    return system, found


def _copy(system: Any, path: str, to: Path, size: int | None) -> None:
    """Copy a file, whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f".{to.name}.unfinished")
    try:
        system.get_file(path, str(unfinished))
        if size not in (None, copied := unfinished.stat().st_size):
            # Some stores end early without an error.
            raise BadData(f"{copied:,} of {size:,} bytes have come; try again")
        os.replace(unfinished, to)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_copied(path: Path, mark: list[Any], known: object) -> bool:
    size = mark[0]
    return known == mark and path.is_file() and size in (None, path.stat().st_size)


def _mark(entry: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={entry[key]}" for key in _MARKS if entry.get(key) is not None)


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
