"""The help, the messages and the exit codes of the command line."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from tutti.cli.commands import AIMS, COMMANDS
from tutti.cli.main import main
from tutti.cli.options import COMMON, GROUPS
from tutti.errors import PeerLost, RankFailed
from tutti.run.config import TrainConfig, flag
from tutti.strategies import EASGD, STRATEGIES


def failing_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Replace `tutti train` by a command that raises `error`."""

    def fail(words: list[str]) -> int:
        print("so far")
        raise error

    module = ModuleType("tutti.cli.train")
    module.TrainCommand = lambda: fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tutti.cli.train", module)


def test_the_help_lists_every_command_by_aim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert {COMMANDS[name].aim for name in COMMANDS} == {*AIMS}
    (paragraph,) = [part for part in shown.split("\n\n") if part.startswith("find the best network:\n")]
    assert [line.split()[0] for line in paragraph.splitlines()[1:]] == ["cv", "ensemble", "tune"]
    assert max(map(len, shown.splitlines())) <= 80
    assert main([]) == 2


@pytest.mark.parametrize("words", [[name] for name in COMMANDS] + [["train", "--strategy", "easgd"]])
def test_the_help_of_a_command_fits_a_terminal_except_for_commands_to_paste(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  tutti ")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_every_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help", "all"]) == 0
    shown = capsys.readouterr().out
    parser = COMMANDS[command]().parser()
    parser.write_help()
    assert all(flag in shown for flag in parser.flags())
    assert all(action.help for action in parser._actions)
    assert "example:" in shown


def test_a_short_help_has_the_common_options_and_a_hint_to_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "--help"])
    shown = capsys.readouterr().out
    options = re.findall("^  -", shown, re.MULTILINE)
    assert len(options) <= 25
    assert "  --clip-norm" not in shown
    assert all(f"\n{title}:\n" in shown for title in GROUPS)
    main(["train", "--help", "all"])
    every = re.findall("^  -", capsys.readouterr().out, re.MULTILINE)
    last = shown.splitlines()[-1]
    assert last == f"'tutti train --help all' explains {len(every) - len(options)} more options."
    main(["report", "--help"])
    assert "--help all" not in capsys.readouterr().out


def test_every_field_of_a_configuration_is_in_exactly_one_group_of_the_help() -> None:
    words = " ".join(GROUPS.values()).split()
    assert len({*words}) == len(words)
    assert {f.name for f in fields(TrainConfig)} - {"model"} <= {*words}
    assert {*COMMON.split()} <= {*words}


def test_the_help_of_train_shows_defaults_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help", "all"])
    shown = " ".join(capsys.readouterr().out.split())
    for f in fields(TrainConfig):
        assert flag(f.name).removesuffix("-options") in shown or f.name == "model"
    assert "samples behind one weight update" in shown
    assert "(default: 32)" in shown


@pytest.mark.parametrize("words", [["--strategy", "easgd", "--help"], ["--strategy=easgd", "-h"]])
def test_the_help_explains_the_options_of_a_strategy(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *words])
    shown = " ".join(capsys.readouterr().out.split())
    assert "options of strategy easgd:" in shown
    assert "--strategy.every VALUE batches of a worker between two exchanges, from 1 (default: 10)" in shown
    assert all(f"--strategy.{f.name} VALUE" in shown for f in fields(EASGD))


def test_every_strategy_is_in_the_help_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}," in shown or f" {name} " in shown for name in STRATEGIES)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tutti 0.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["--verison"], "unknown option '--verison'; did you mean '--version'?"),
        (["train", "--strategy", "eazgd", "--help"], "unknown strategy 'eazgd'; did you mean 'easgd'?"),
    ],
)
def test_an_unknown_word_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"tutti: error: {message}")


def test_an_option_before_the_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--epochs=5"]) == 2
    said = capsys.readouterr().err
    assert "unknown option '--epochs'" in said
    assert "The options of a command follow it: tutti COMMAND [OPTIONS]" in said
    assert "verify" not in said


def test_an_unknown_option_names_the_three_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--epoch", "3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tutti: error: unknown option '--epoch'; did you mean '--epochs'? The nearest of ")
    assert said.partition("The nearest of ")[2].partition(".")[0].count("--") == 3


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            RankFailed(3, "Traceback ...\nValueError: broken\n"),
            1,
            "error: rank 3 failed:\nTraceback ...\nValueError: broken",
        ),
        (PeerLost([1], "killed by signal 9"), 1, "error: lost rank 1: killed by signal 9"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_printed_last(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_command(monkeypatch, error)
    assert main(["train"]) == code
    assert capsys.readouterr() == ("so far\n", f"tutti: {message}\n")


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u")])
def test_too_many_open_files_or_processes_are_one_message_with_a_remedy(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_command(monkeypatch, OSError(number, os.strerror(number)))
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert remedy in said
    assert "Traceback" not in said


@pytest.mark.parametrize("module", ["tutti.cli.commands", "tutti.cli.train", "tutti.run.resume"])
def test_ctrl_c_during_the_imports_is_one_line(module: str) -> None:
    program = f"""
import os, signal, sys

class Interruption:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interruption)
from tutti.cli.main import main
sys.exit(main(["train"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tutti: interrupted\n")


@pytest.mark.parametrize("words", ["--help", "doctor --help", "train --steps 1 -n 2", "train --steps 1 -n 1"])
def test_the_command_ends_quietly_if_nobody_reads_its_output(words: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tutti", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
