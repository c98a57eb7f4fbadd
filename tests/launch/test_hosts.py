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


@pytest.mark.parametrize("given", ["", "a:", "a:0", "a:x", "a:-1", "a:4,,b:2", "a b", ":4", "-x:2", "a:4:2"])
def test_what_is_no_host_is_refused(given: str) -> None:
    with pytest.raises(BadOption, match=r"node1:4|whole number"):
        read_hosts(given)


def test_a_host_that_is_named_twice_is_refused() -> None:
    with pytest.raises(BadOption, match=r"names 'a' 2 times"):
        read_hosts("a:1,b:1,a:2")


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=many\n")
    with pytest.raises(BadOption, match=r"line 2: 'b' has 'many' ranks"):
        read_hosts(str(file))


def test_an_empty_or_missing_host_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# nobody\n")
    with pytest.raises(BadOption, match="names no host"):
        read_hosts(str(file))
    with pytest.raises(BadOption, match="cannot read the host file"):
        read_hosts(str(tmp_path / "missing"))
