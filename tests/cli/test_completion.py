"""What the Tab key completes: in the shells themselves, and what their candidates are."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from argcomplete import CompletionFinder

from tutti.cli.commands import COMMANDS
from tutti.cli.completion import SHELLS, parser_of
from tutti.cli.main import main

IN_BASH = """
eval "$(tutti completion bash)"
function=$(complete -p tutti | sed 's/.*-F \\([^ ]*\\).*/\\1/')
for COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    $function tutti
    printf '%s\\n' "${COMPREPLY[@]}"
done
"""


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `tutti` is this one, in a folder without files."""
    command = tmp_path / "bin" / "tutti"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom tutti.cli.main import main\nsys.exit(main())\n")
    command.chmod(0o755)
    sources = os.pathsep.join([*filter(None, sys.path)])
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": sources, "HOME": str(tmp_path), "TERM": "dumb"}


def candidates(line: str) -> list[str]:
    """What the word at the end of a command line can become."""
    _, name, *words = line.split(" ")
    finder = CompletionFinder(parser_of(name, words[:-1]), always_complete_options=False)
    text, found = " ".join(words), list[str]()
    while (one := finder.rl_complete(text, len(found))) is not None:
        found.append(one.rstrip().rpartition(" ")[2])
    return found


def test_bash_completes_commands_options_and_names(shell_environment: dict[str, str], tmp_path: Path) -> None:
    lines = ["tutti ensem", "tutti train --accum", "tutti train len"]
    program = ["bash", "--norc", "-c", IN_BASH, "bash", *lines]
    done = subprocess.run(program, env=shell_environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["ensemble", "--accumulate", "lenet"], done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_and_says_what_an_option_is(shell_environment: dict[str, str], tmp_path: Path) -> None:
    program = "tutti completion fish | source; complete -C 'tutti train --accum'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program],
        env=shell_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("--accumulate\tcompute each worker's part of an update"), done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_on_the_tab_key(shell_environment: dict[str, str], tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], shell_environment)
    os.write(terminal, b"autoload -U compinit; compinit -u; eval \"$(tutti completion zsh)\"; echo re''ady\n")
    read_until(terminal, b"ready")
    os.write(terminal, b"tutti train --accum\t")
    read_until(terminal, b"ulate")
    os.close(terminal)
    os.waitpid(process, 0)


def read_until(terminal: int, word: bytes) -> None:
    seen, end = b"", time.monotonic() + 30
    while word not in seen:
        assert select.select([terminal], [], [], end - time.monotonic())[0], seen
        seen += os.read(terminal, 4096)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_lines_for_a_shell_name_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "tutti" in capsys.readouterr().out


def test_another_shell_is_refused_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "give one of bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_a_candidate(name: str) -> None:
    flags = [flag for flag in COMMANDS[name]().parser().flags() if not flag.endswith(".KEY")]
    assert {*flags} <= {*candidates(f"tutti {name} -"), *candidates(f"tutti {name} --")}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tutti train --strategy hog", ["hogwild"]),
        ("tutti train --metrics accuracy,calib", ["accuracy,calibration_error"]),
        ("tutti train --layout batch", ["batch_last"]),
        ("tutti train --model.hidden 3 mlp --model.act", ["--model.activation"]),
        ("tutti train --strategy easgd --strategy.ev", ["--strategy.every"]),
        ("tutti train --strategy=easgd --strategy.ev", ["--strategy.every"]),
        ("tutti train --optimizer.momentum 0.9 --data dig", ["digits"]),
        ("tutti train --epochs ", []),
        ("tutti cv lenet,goo", ["lenet,googlenet"]),
    ],
)
def test_values_and_the_options_of_parts_are_completed(
    line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert candidates(line) == found


def test_completing_imports_no_torch() -> None:
    program = """
import sys
from tutti.cli.completion import parser_of
parser_of("train", ["mlp"]).write_help()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
