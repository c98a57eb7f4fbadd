"""Data at an address (s3://, gs://, https://, ...), which each host copies into its cache once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from tutti.errors import BadData, BadOption, BadRunFolder
from tutti.records.files import cache_folder, locked_file, replace_file
from tutti.terminal import warn_on_stderr

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

_WEB: Final = ("https", "http")
"""The schemes whose addresses have queries, and pages in place of folders."""

_CONNECT_S: Final = 30
_STALLED_S: Final = 60
"""The seconds without a byte after which a server counts as stalled; a whole copy may take any time."""

_MANIFEST: Final = "copied.json"
_LOCK: Final = "lock"
_MARKS: Final = (
    *("ETag", "etag", "md5Hash", "content_md5", "blob_id", "mtime"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)
"""Facts that stores give of a file, of which any tells another content of the same size."""


def is_remote(data: object) -> bool:
    """Tell whether data are at an address, such as 's3://bucket/folder'."""
    return isinstance(data, str) and "://" in data


def check_address(url: str) -> None:
    """Refuse addresses of an unknown scheme, and those with a password, which run folders would tell.

    Raises:
        BadOption: the message lists the schemes that there are.
    """
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
    """Return an address without its query, which may be a signature that lets in whoever has it."""
    return url.partition("?")[0] if urlsplit(url).scheme in _WEB else url


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
        with locked_file(place / _LOCK):
            _bring(data, place, name)
    except (OSError, BadRunFolder) as error:
        cause = error.__cause__ if isinstance(error, BadRunFolder) else error
        why = cause.strerror if isinstance(cause, OSError) else cause
        raise BadData(
            f"{shown(data)} cannot be copied to {place}: {why}; set TUTTI_CACHE to a folder that can be "
            "written, on a disk with room"
        ) from error
    return place / name


def _name_of(url: str) -> str:
    """Return the name of the copy of an address: its last one, which has the ending of a file."""
    split = urlsplit(url)
    # Only the web has queries: elsewhere # and ? are parts of names.
    name = PurePosixPath(split.path if split.scheme in _WEB else url.partition("://")[2]).name
    return "data" if name in ("", "..", _MANIFEST, _LOCK) else name


def _bring(url: str, place: Path, name: str) -> None:
    """Make the copy of an address the same as what is there."""
    manifest = place / _MANIFEST
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(manifest.read_text()))
    try:
        system, found = _listed(url, name)
    except (ImportError, BadOption):
        raise
    except Exception as error:  # Each store has errors of its own.
        if not known:
            raise BadData(f"{shown(url)} cannot be read: {_said(error, url)}") from error
        warn_on_stderr(f"{shown(url)} cannot be read ({_said(error, url)}); its copy in {place} is used")
        return
    marks = {to: _mark(about) for to, (_, about) in found.items()}
    wanted = [to for to, mark in marks.items() if known.get(to) != mark or not (place / to).is_file()]
    if any(to not in wanted and not mark for to, mark in marks.items()):
        warn_on_stderr(
            f"{shown(url)} does not say whether it has changed; its copy in {place} is used: delete that "
            "folder to copy it again"
        )
    for to in known.keys() - marks.keys():
        (place / to).unlink(missing_ok=True)
    if wanted:
        size = sum(int(found[to][1].get("size") or 0) for to in wanted)
        what = f"{len(wanted):,} files, {size / 1e9:.2f} GB"
        print(f"copying {what}, from {shown(url)} to {place}", file=sys.stderr, flush=True)
    copied = {to: mark for to, mark in marks.items() if to not in wanted}
    try:
        for to in wanted:
            path, about = found[to]
            _copy(system, path, place / to, about.get("size"))
            copied[to] = marks[to]
    except (OSError, BadRunFolder) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # What to do about it is said above.
        raise _not_copied(url, path, error) from error
    except Exception as error:
        raise _not_copied(url, path, error) from error
    finally:
        if wanted or known != copied:
            with suppress(BadRunFolder):  # A whole copy is used also where nothing more can be written.
                replace_file(manifest, json.dumps(copied).encode())


def _not_copied(url: str, path: str, error: Exception) -> BadData:
    return BadData(
        f"{shown(path)} of {shown(url)} cannot be copied: {_said(error, url)}; what has come is kept, so try "
        "again"
    )


def _listed(url: str, name: str) -> tuple[Any, dict[str, tuple[str, Mapping[str, Any]]]]:
    """Return the store, and its files by their paths in the copy, with what it says about them."""
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        system, root = fsspec.core.url_to_fs(url, **_patience(scheme))
    except ImportError as error:
        raise BadOption(f"{scheme}:// needs another package: pip install {SCHEMES[scheme]}") from error
    if scheme in _WEB:
        return system, _on_the_web(system, root, name)
    if system.isfile(root):
        return system, {name: (root, system.info(root))}
    found = {}
    for path, entry in system.find(root, detail=True).items():
        inner = PurePosixPath(path).relative_to(PurePosixPath(root))
        found[_inside(inner, name, path)] = path, entry
    if not found:
        raise BadData("there are no files")
    return system, found


def _patience(scheme: str) -> dict[str, Any]:
    """Return what a store is opened with, so that it waits for long copies, and not for a stalled server."""
    if scheme not in _WEB:
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_STALLED_S)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "use_listings_cache": False}


def _on_the_web(system: Any, root: str, name: str) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return a file, or those that a page links to which stands for a folder."""
    about = system.info(root)
    if about.get("mimetype") != "text/html":
        return {name: (root, about)}
    linked = [path for path in system.find(root) if not urlsplit(path).query and not path.endswith("/")]
    folder = PurePosixPath(unquote(urlsplit(root).path))
    entries = [system.info(path) for path in linked]  # A page does not say sizes.
    found = {
        _inside(PurePosixPath(unquote(urlsplit(path).path)).relative_to(folder), name, path): (path, entry)
        for path, entry in zip(linked, entries, strict=True)
    }
    if not found:
        raise BadData("it is a page that links to no files below it")
    return found


def _inside(inner: PurePosixPath, name: str, path: str) -> str:
    """Return where the copy of a file of a folder lies.

    Raises:
        BadData: outside of it.
    """
    if ".." in inner.parts or inner.is_absolute():
        raise BadData(f"it has a file {path}, which lies outside of it")
    return str(PurePosixPath(name) / inner)


def _copy(system: Any, path: str, to: Path, size: int | None) -> None:
    """Copy a file, whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f".{to.name}.unfinished")
    try:
        system.get_file(path, str(unfinished))
        if size not in (None, copied := unfinished.stat().st_size):
            # Some stores end early without an error.
            raise BadData(f"{copied:,} of {size:,} bytes have come")
        os.replace(unfinished, to)
    finally:
        unfinished.unlink(missing_ok=True)


def _mark(about: Mapping[str, Any]) -> str:
    """Return the facts by which another content is seen; empty: the store tells none."""
    return " ".join(f"{key}={about[key]}" for key in ("size", *_MARKS) if about.get(key) is not None)


def _said(error: BaseException, url: str) -> str:
    """Return the first line of an error, without what `shown` leaves out."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # The web's answer; the error itself has nothing but the address.
    if isinstance(error, TimeoutError):
        return f"nothing has come for {_STALLED_S} s"
    query, text = urlsplit(url).query, (str(error) or type(error).__name__).splitlines()[0]
    return (text.replace(query, "...") if query else text)[:200]
