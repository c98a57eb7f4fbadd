"""The kernels are compiled once for a processor; what goes wrong is said with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.batch_last import compiler
from tutti.errors import BadOption

COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""
"""A compiler that notes how it is called."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path))
    return tmp_path


def as_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    path = folder / "compiler"
    path.write_text(text.format(log=folder / "log"))
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    return folder / "log"


def test_they_are_compiled_once_for_each_type(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = as_compiler(cache, monkeypatch, COMPILER)
    paths = {compiler.compiled(real) for real in ("float", "double", "float")}
    assert sorted(path.read_text() for path in paths) == ["compiled\n"] * 2
    assert len(log.read_text().splitlines()) == 2


def test_another_processor_gets_its_own_kernels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_compiler(cache, monkeypatch, COMPILER)
    here = compiler.compiled("float")
    monkeypatch.setattr(compiler, "_processor", lambda: "flags : another")
    assert compiler.compiled("float") != here


def test_without_a_compiler_the_remedy_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(BadOption, match="needs a C compiler, and there is none: install one"):
        compiler.compiled("float")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "#!/bin/sh\necho 'no such option -O3' >&2; exit 1\n",
            "fails: no such option -O3; set CC to another",
        ),
        ("#!/bin/sh\nexit 3\n", "fails: exit status 3"),
        ("#!/nowhere\n", "cannot be run: No such file or directory"),
    ],
)
def test_a_compiler_that_fails_is_told_with_its_first_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    as_compiler(cache, monkeypatch, text)
    with pytest.raises(BadOption, match=why):
        compiler.compiled("float")
    assert not list(cache.rglob("*.so"))


def test_a_cache_that_cannot_be_made_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_compiler(cache, monkeypatch, COMPILER)
    monkeypatch.setenv("TUTTI_CACHE", str(cache / "compiler"))
    with pytest.raises(BadOption, match=r"no kernels can be kept in .*set TUTTI_CACHE"):
        compiler.compiled("float")


def test_kernels_that_cannot_be_loaded_are_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_compiler(cache, monkeypatch, COMPILER)
    with pytest.raises(BadOption, match=r"cannot be loaded: .*remove the file, set TUTTI_CACHE"):
        compiler.kernels.__wrapped__("float")
