"""Whose configurations may have code imported. Needs no torch.

A configuration may name a module or a file of Python, which runs when it is loaded, and the file of a whole
model, which may have code run; a run folder that came from elsewhere must not. So a run leaves a seal beside
its configuration: a keyed hash (HMAC-SHA-256, RFC 2104) with a key that this user alone can read, over the
configuration and over where the named code lies.
What has no such seal may name only what is built in, until the user says that it is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from tutti.errors import UserError
from tutti.load_object import names_object
from tutti.models import names_file
from tutti.records.json_lines import to_json
from tutti.records.run_folder import SEAL
from tutti.records.untrusted import printable, read_file

KEY_BYTES: Final = 32

HOSTS: Final = "hosts"
"""The field that has programs started on other machines."""


LISTS: Final = ("metrics", "augment", "callbacks")
"""The fields whose texts are names with commas."""


class Untrusted(UserError):
    """A configuration that would run code, and that this user has not written."""


def code_named(config: Mapping[str, Any]) -> dict[str, str]:
    """The code that a configuration has run, by where it is named, such as {"model": "mine.py:net"}.

    Of several names in one field the second is "metrics 2".

    Args:
        config: as JSON values.
    """
    return dict(found for field, value in config.items() for found in _named(field, value))


def _named(field: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        part = field.removesuffix("_options")
        for key, item in value.items():
            yield from _named(f"{part}.{key}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(field, item)
    elif isinstance(value, str) and field in LISTS:
        named = [word for word in map(str.strip, value.split(",")) if names_object(word)]
        for number, word in enumerate(named, 1):
            yield field if number == 1 else f"{field} {number}", word
    elif isinstance(value, str) and (names_object(value) or names_file(value) or field == HOSTS):
        yield field, value


def seal(config: Mapping[str, Any]) -> str | None:
    """The seal of a configuration that names code; None without such, or where this user can have no key."""
    names = code_named(config)
    key = _key(make=True) if names else None
    return None if key is None else _hash(key, config, names)


def check(path: Path, config: Mapping[str, Any], replaced: Collection[str] = ()) -> None:
    """Refuse a configuration that names code, unless a run of this user wrote it.

    Args:
        path: of the file.
        config: what it holds, as JSON values.
        replaced: fields that will be others than it says.

    Raises:
        Untrusted: it is somebody else's, or was changed since.
    """
    names = code_named(config)
    if not names or _sealed(path.parent / SEAL, config, names):
        return
    left = code_named({field: value for field, value in config.items() if field not in replaced})
    if left:
        listed = ", ".join(f"{printable(field)} '{printable(name)}'" for field, name in left.items())
        raise Untrusted(
            f"{path} would have code run: {listed}; and no run of yours has written it, with that code where "
            "it is now. Look at that code, then give --trust if it may run"
        )


def _sealed(path: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    key = _key(make=False)
    with suppress(OSError):
        found = read_file(path, most=1 << 10).strip()
        return key is not None and hmac.compare_digest(found, _hash(key, config, names).encode())
    return False


def _hash(key: bytes, config: Mapping[str, Any], names: Mapping[str, str]) -> str:
    # Who copies the folder of a run beside code of his own must not have that run.
    places = {name: place_of_code(name) for name in names.values()}
    text = to_json([dict(config), places])
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def place_of_code(name: str) -> str:
    """Return the place of the named code, found without importing it; empty where there is none."""
    where = name.rpartition(":")[0] or name
    if where.endswith(".py") or names_file(where):
        return str(Path(where).expanduser().resolve())
    with suppress(ImportError, ValueError):
        found = PathFinder.find_spec(where.partition(".")[0], [*sys.path, str(Path.cwd())])
        if found is not None:
            return str(found.origin or [*(found.submodule_search_locations or ())])
    return ""


def _key(make: bool) -> bytes | None:
    """The user's key; None where there is none, or one that others could have read or written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = state_folder() / "key"
        if make and not path.exists():
            _make_key(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(KEY_BYTES)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and len(key) == KEY_BYTES:
            return key
    return None


def _make_key(path: Path) -> None:
    """Make the key; of several that make it at a time, one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


def state_folder() -> Path:
    """Return the folder of this user's key: `tutti` in XDG_STATE_HOME, by default ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tutti"
