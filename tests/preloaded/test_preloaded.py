"""A program that a server forks is to its launcher what Python would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import interpreter

PROGRAM = """
import json, os, signal, sys
if __name__ == "__main__":
    place = sys.argv, os.getcwd(), os.environ["OWN"]
    print(json.dumps([*place, sys.stdin.read(), "torch" in sys.modules]), flush=True)
    print("said", file=sys.stderr)
    exec(sys.argv[1])
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [*interpreter(), str(path)]


def test_it_has_the_arguments_folder_environment_and_streams_of_its_launcher(
    program: list[str], tmp_path: Path
) -> None:
    environment = os.environ | {"OWN": "variable"}
    done = subprocess.run(
        [*program, "pass", "b c"], cwd=tmp_path, env=environment, input="in", capture_output=True, text=True
    )
    expected = [[program[-1], "pass", "b c"], str(tmp_path), "variable", "in", True]
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, expected, "said\n")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(7)", 7),
        ("raise KeyError", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_it_ends_as_the_program_does(program: list[str], how: str, code: int) -> None:
    environment = os.environ | {"OWN": ""}
    done = subprocess.run([*program, how], env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == code


RANKS = """
import os, tempfile, tutti
from torch import nn
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            tutti.train(net, "digits", steps=1, workers=2, quiet=True)
            assert os.path.exists(folder)
"""


def test_ranks_that_end_leave_the_temporary_folders_of_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RANKS)
    command = [*interpreter(starts_ranks=True), str(tmp_path / "program.py")]
    assert not subprocess.run(command, stdin=subprocess.DEVNULL).returncode
