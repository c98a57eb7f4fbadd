"""Data at an address (s3://, gs://, https://, ...), which each host copies into its cache once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from tutti.errors import BadData, BadOption, BadRunFolder
from tutti.records.files import cache_folder, locked_file, unfinished_file
from tutti.terminal import warn_on_stderr

SCHEMES: Final = ("s3", "gs", "gcs", "az", "abfs", "https", "hf", "sftp", "hdfs", "file", "memory")
"""The schemes of addresses; most need a package beside fsspec, which says so."""

_WEB: Final = ("https", "http")
"""The schemes whose addresses have queries, and no folders."""

_CONNECT_S: Final = 30
_STALLED_S: Final = 60
"""The seconds without a byte after which a server counts as stalled; a whole copy may take any time."""

_MARKS: Final = (
    *("ETag", "etag", "md5Hash", "content_md5", "blob_id", "mtime"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)
"""Facts that stores give of a file; another content has others."""


def is_remote(data: object) -> bool:
    """Return whether data are at an address, such as 's3://bucket/folder'."""
    return isinstance(data, str) and "://" in data


def check_address(url: str) -> None:
    """Refuse addresses with an unknown scheme, or with a password, which run folders would keep."""
    split = urlsplit(url)
    if split.password is not None:
        raise BadOption(
            f"the address at {split.hostname} has a password in it, which the run folder would keep; leave "
            "it out, and keep it where the store's package looks: ~/.netrc for https, ~/.ssh for sftp"
        )
    if split.scheme not in SCHEMES:
        raise BadOption(
            f"{shown(url)} begins with {split.scheme}://; data come by {', '.join(SCHEMES)}, or from a path"
        )


def shown(url: str) -> str:
    """Return an address without its query, which may be a signature that grants access."""
    return url.partition("?")[0] if urlsplit(url).scheme in _WEB else url


def local_copy(data: object) -> object:
    """Return the path of a copy on this host if data are at an address, else the data themselves.

    Files are copied again only if the address gives another size, time or checksum. Of several processes one
    copies, and the others wait for it. Without a connection the copy is used with a warning.
    """
    if not isinstance(data, str) or not is_remote(data):
        return data
    check_address(data)
    split = urlsplit(data)
    # Only the web has queries: elsewhere # and ? are parts of names.
    name = PurePosixPath(split.path if split.scheme in _WEB else data.partition("://")[2]).name
    place = cache_folder() / "remote" / hashlib.sha256(data.encode()).hexdigest()[:16]
    copy = place / "copy" / ("data" if name in ("", "..") else name)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(place / "lock"):
            _bring(data, copy, place / "copied.jsonl")
    except (OSError, BadRunFolder) as error:
        raise BadData(
            f"{shown(data)} cannot be copied to {place}: {_reason(error, data)}; set TUTTI_CACHE to a folder "
            "that can be written, on a disk with room"
        ) from error
    return copy


def _bring(url: str, copy: Path, manifest: Path) -> None:
    """Bring the copy of an address up to date.

    The manifest has a line for each copied file: its path, and facts that identify its content.
    """
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = dict(map(json.loads, manifest.read_text().splitlines()))
    try:
        system, root, found = _listed(url)
    except BadOption:
        raise
    except Exception as error:  # each store has its own kinds of errors
        if not known:
            raise BadData(f"{shown(url)} cannot be read: {_reason(error, url)}") from error
        warn_on_stderr(f"{shown(url)} cannot be read ({_reason(error, url)}); its copy {copy} is used")
        return
    for inner in known.keys() - found.keys():
        (copy / inner).unlink(missing_ok=True)
    marks = {inner: _marks(about) for inner, about in found.items()}
    wanted = [
        inner
        for inner in sorted(marks)
        if not marks[inner] or known.get(inner) != marks[inner] or not (copy / inner).is_file()
    ]
    if wanted:
        size = sum(int(found[inner].get("size") or 0) for inner in wanted)
        what = f"{len(wanted):,} files, {size / 1e9:.2f} GB"
        print(f"copying {what}, from {shown(url)} to {copy}", file=sys.stderr, flush=True)
    for inner in wanted:
        path = f"{root}/{inner}" if inner else root
        try:
            _copy(system, path, copy / inner, found[inner].get("size"))
        except Exception as error:
            raise BadData(
                f"{shown(path)} cannot be copied to {copy}: {_reason(error, url)}; what has come is kept, so "
                "try again; TUTTI_CACHE names another folder for it"
            ) from error
        with manifest.open("a") as file:
            file.write(json.dumps([inner, marks[inner]]) + "\n")


def _listed(url: str) -> tuple[Any, str, dict[str, Mapping[str, Any]]]:
    """Return the store, the address there, and the facts of the files below it; "": of a single one."""
    import fsspec

    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {}
    if scheme in _WEB:
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_STALLED_S)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}, "use_listings_cache": False}
    try:
        system, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise BadOption(f"{scheme}:// needs another package: {error}") from error
    if scheme in _WEB or system.isfile(root):
        return system, root, {"": system.info(root)}
    root = root.rstrip("/")
    files = {path.removeprefix(f"{root}/"): one for path, one in system.find(root, detail=True).items()}
    if not files:
        raise BadData("there are no files")
    for inner in files:
        if ".." in PurePosixPath(inner).parts or inner.startswith("/"):
            raise BadData(f"it has a file {inner}, which lies outside of it")
    return system, root, files


def _copy(system: Any, path: str, to: Path, size: int | None) -> None:
    """Copy a file, whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_file(to)
    try:
        system.get_file(path, str(unfinished))
        if size not in (None, copied := unfinished.stat().st_size):
            # Some stores end early without an error.
            raise BadData(f"{copied:,} of {size:,} bytes have come")
        os.replace(unfinished, to)
    finally:
        unfinished.unlink(missing_ok=True)


def _marks(about: Mapping[str, Any]) -> str:
    """Return facts that identify a content; empty: the store gives only the size."""
    marks = [f"{key}={about[key]}" for key in _MARKS if about.get(key) is not None]
    return " ".join([*marks, f"size={about.get('size')}"]) if marks else ""


def _reason(error: BaseException, url: str) -> str:
    """Return the first line of an error, without the parts that `shown` removes."""
    if isinstance(error, FileNotFoundError | BadRunFolder) and error.__cause__ is not None:
        error = error.__cause__  # the web's answer, or the system's
    if isinstance(error, TimeoutError):
        return f"nothing has come for {_STALLED_S} s"
    query, text = urlsplit(url).query, (str(error) or type(error).__name__).splitlines()[0]
    return (text.replace(query, "...") if query else text)[:200]
