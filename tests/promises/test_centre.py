"""Workers that are runs of their own, and a centre that is a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.promises.command import LIMIT_S, started, summary, wait_until

pytestmark = pytest.mark.timeout(600)

CALLBACK = """
import os, time
from pathlib import Path
import tutti

HERE = Path(__file__).parent

class Noted(tutti.Callback):
    def step(self, course):
        (HERE / os.environ["WORKER"]).write_text(str(course.step))
        if (HERE / "end").exists():
            course.stop("it was asked to")
        time.sleep(0.01)  # Nobody reads its lines meanwhile.
"""


# Promise 20
def test_a_lost_worker_comes_back_and_others_go_on_without_it_and_without_the_centre(tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(CALLBACK)
    (tmp_path / "key").write_text("0123456789abcdef")

    def centre(address: str) -> str:
        return f"tutti centre --listen {address} --key key --keep centre"

    def worker(name: str, address: str) -> str:
        options = f"--strategy async_diloco --strategy.centre {address} --strategy.key key -n 1"
        run = f"--steps 10000000 --callbacks noted.py:Noted --resume auto --trust --out {name}"
        return f"tutti train mlp --lr 0.003 --seed {ord(name)} {options} {run}"

    def goes_on(name: str, steps: int = 40) -> None:
        before = int((tmp_path / name).read_text() or "0")
        wait_until(lambda: int((tmp_path / name).read_text() or "0") >= before + steps)

    def first_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    with started(centre("127.0.0.1:0"), tmp_path) as keeper:
        found = re.match(r"centre at (\S+), 0 messages so far", first_line(keeper))
        assert found is not None
        address = found[1]
        with started(worker("a", address), tmp_path, WORKER="step-a") as a:
            with started(worker("b", address), tmp_path, WORKER="step-b") as lost:
                wait_until(lambda: (tmp_path / "step-a").exists() and (tmp_path / "step-b").exists())
                os.killpg(lost.pid, signal.SIGKILL)
                lost.communicate()
            goes_on("step-a")
            (tmp_path / "step-b").unlink()
            with started(worker("b", address), tmp_path, WORKER="step-b") as b:
                wait_until((tmp_path / "step-b").exists)
                keeper.terminate()
                said = keeper.communicate(timeout=LIMIT_S)[0]
                assert re.search(r"centre: [1-9]\d* messages", said), said
                assert keeper.returncode == 0
                goes_on("step-a")
                goes_on("step-b")
                with started(centre(address), tmp_path) as again:
                    assert re.match(r"centre at \S+, [1-9]\d* messages so far", first_line(again))
                    assert {first_line(again)[0], first_line(again)[0]} == {"+"}
                    goes_on("step-a")
                    (tmp_path / "end").touch()
                    for name, process in (("a", a), ("b", b)):
                        out, err = process.communicate(timeout=LIMIT_S)
                        assert process.returncode == 0, out + err
                        assert "lost the centre" in err
                        assert summary(tmp_path / name)["test"]["metrics"]["accuracy"] > 0.8
