"""What the command line says and which exit code it gives."""

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
    """Put a command that raises `error` in the place of `tutti train`."""

    def fail(words: list[str]) -> int:
        print("so far")
        raise error

    module = ModuleType("tutti.cli.train")
    module.TrainCommand = lambda: fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tutti.cli.train", module)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2


def test_the_help_puts_commands_of_one_aim_together(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    shown = capsys.readouterr().out
    assert {COMMANDS[name].aim for name in COMMANDS} == {*AIMS}
    (paragraph,) = [part for part in shown.split("\n\n") if part.startswith("find the best network:\n")]
    assert [line.split()[0] for line in paragraph.splitlines()[1:]] == ["cv", "ensemble", "tune"]


def test_the_lines_of_the_help_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("words", [[name] for name in COMMANDS] + [["train", "--strategy", "easgd"]])
def test_the_help_of_a_command_fits_a_terminal_but_for_commands_to_paste(
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


def test_a_short_help_has_the_options_that_most_people_need_and_names_the_rest(
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


def test_every_field_of_a_configuration_is_in_one_group_of_the_help() -> None:
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


def test_the_help_says_what_workers_push_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--strategy", "downpour", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "in the centre, to which workers push gradients, or on each worker" in shown


def test_the_help_names_a_strategy_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--strategy", "eazgd", "--help"]) == 2
    assert "did you mean 'easgd'?" in capsys.readouterr().err


def test_every_strategy_is_in_the_help_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}," in shown or f" {name} " in shown for name in STRATEGIES)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tutti 0.")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("tutti: error: unknown command 'trian'; did you mean 'train'?")


def test_an_option_before_any_command_is_told_from_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--verison"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tutti: error: unknown option '--verison'; did you mean '--version'?")
    assert main(["--epochs=5"]) == 2
    said = capsys.readouterr().err
    assert "unknown option '--epochs'" in said
    assert "stand after it: tutti COMMAND [OPTIONS]" in said
    assert "verify" not in said


def test_an_unknown_option_names_the_three_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--epoch", "3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tutti: error: unknown option '--epoch'; did you mean '--epochs'? The nearest of ")
    assert said.partition("The nearest of ")[2].partition(".")[0].count("--") == 3


def test_the_traceback_of_a_failed_rank_comes_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_command(monkeypatch, RankFailed(3, "Traceback ...\nValueError: broken\n"))
    assert main(["train"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "tutti: error: rank 3 failed:\nTraceback ...\nValueError: broken\n"
    assert shown.out == "so far\n"


def test_a_lost_peer_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command(monkeypatch, PeerLost([1], "killed by signal 9"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "tutti: error: lost rank 1: killed by signal 9\n"


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u")])
def test_too_many_open_files_and_processes_are_the_users_to_mend(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_command(monkeypatch, OSError(number, os.strerror(number)))
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert remedy in said
    assert "Traceback" not in said


def test_ctrl_c_gives_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing_command(monkeypatch, KeyboardInterrupt())
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "tutti: interrupted\n"


@pytest.mark.parametrize("module", ["tutti.cli.commands", "tutti.cli.train", "tutti.run.resume"])
def test_ctrl_c_while_the_command_is_being_imported_is_one_line(module: str) -> None:
    program = f"""
import os, signal, sys

class Interruption:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interruption)
from tutti.cli.main import main
from tutti.cli.options import COMMON, GROUPS
sys.exit(main(["train"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tutti: interrupted\n")


@pytest.mark.parametrize("words", ["--help", "doctor --help", "train --steps 1 -n 2", "train --steps 1 -n 1"])
def test_when_nobody_reads_what_is_printed_the_command_ends_quietly(words: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tutti", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
