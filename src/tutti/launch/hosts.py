"""The hosts of a job and their ranks: 'a:4,b:4', or a file with a host on each line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import BadOption

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it gets.

    Attributes:
        name: its name in the network, or its IPv4 address.
        ranks: the number of ranks that run there.
    """

    name: str
    ranks: int


def read_hosts(given: str) -> tuple[Host, ...]:
    """The hosts that the option `--hosts` names.

    Args:
        given: "a:4,b:4" (a host without a number gets one rank), or the path of a host file, whose lines read
            "a slots=4", "a:4" or "a"; a # begins a comment.

    Returns:
        The hosts in the order given.

    Raises:
        BadOption: there is no host in it, a name or number cannot be used, or a host is named twice.
    """
    path = Path(given)
    if path.is_file() or "/" in given:
        entries = _lines_of(path)
    else:
        entries = [(f"--hosts '{given}'", entry.strip()) for entry in given.split(",")]
    hosts = tuple(_host(where, entry) for where, entry in entries)
    if not hosts:
        raise BadOption(
            f"the host file {path} names no host; write one on each line, such as 'node1 slots=4'"
        )
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise BadOption(
                f"--hosts names '{name}' {names.count(name)} times; name it once, with all its ranks"
            )
    return hosts


def _lines_of(path: Path) -> list[tuple[str, str]]:
    """(where it stands, the text) of each line of a host file that is not empty."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(
            f"cannot read the host file {path}: {error}; give a file with a line such as 'node1 slots=4' "
            "for each host, or --hosts node1:4,node2:4"
        ) from None
    texts = [(f"{path}, line {number}", line.split("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return [(where, text) for where, text in texts if text]


def _host(where: str, entry: str) -> Host:
    name, _, number = re.sub(r"\s+slots\s*=\s*", ":", entry).partition(":")
    if not _NAME.fullmatch(name) or not (number or ":" not in entry):
        raise BadOption(
            f"{where}: '{entry}' is not a host; write a name and its number of ranks, such as node1:4"
        )
    if number and not (number.isdecimal() and int(number) >= 1):
        raise BadOption(
            f"{where}: '{name}' has '{number}' ranks; give a whole number of at least 1: {name}:4"
        )
    return Host(name, int(number or 1))
