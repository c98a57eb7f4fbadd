"""The option --hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import BadOption
from tutti.launch.placement import Host, read_hosts


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("a:4,b:2", (Host("a", 4), Host("b", 2))),
        ("localhost", (Host("localhost", 1),)),
        (" node-1.cluster:8 , 10.0.0.7:2 ", (Host("node-1.cluster", 8), Host("10.0.0.7", 2))),
    ],
)
def test_hosts_are_read_from_the_option(given: str, hosts: tuple[Host, ...]) -> None:
    assert read_hosts(given) == hosts


def test_hosts_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# my machines\na slots=4\n\nb:2  # the small one\nc\n")
    assert read_hosts(str(file)) == (Host("a", 4), Host("b", 2), Host("c", 1))


@pytest.mark.parametrize(
    "given",
    ["", "a:", "a:0", "a:x", "a:-1", "a:4,,b:2", "a b", ":4", "-x:2", "a:4:2", "a:1,b:1,a:2", "no/file"],
)
def test_invalid_hosts_are_refused(given: str) -> None:
    with pytest.raises(BadOption, match="node1:4"):
        read_hosts(given)


@pytest.mark.parametrize("lines", ["a slots=4\nb slots=many\n", "# nothing\n"])
def test_a_host_file_that_cannot_be_used_is_refused(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(lines)
    with pytest.raises(BadOption, match="node1:4"):
        read_hosts(str(file))
