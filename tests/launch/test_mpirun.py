"""Ranks on hosts, started by mpirun: by ours (`--hosts`), or by one that the user typed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.launch.processes import lives, wait_for_files, wait_until_gone
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import forked_mpi_ranks, interpreter
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadData, LauncherLost, OutputClosed, PeerLost, RankFailed, TuttiError, UserError
from tutti.launch import guard, mpirun, mpirun_outcome, ranks_on_hosts
from tutti.launch.exit_reports import Report
from tutti.launch.liveness import DONE, FAILED, LivenessAddress, LivenessWatch, RankEnd
from tutti.launch.mpi_rank import START, MpiStart
from tutti.launch.mpirun import Mpirun, command_line, find_mpirun, settings
from tutti.launch.mpirun_channel import MpirunChannel, RankStarted
from tutti.launch.mpirun_outcome import outcome
from tutti.launch.placement import Host, Placement, place_ranks
from tutti.launch.ranks_on_hosts import LARGEST_IN_ENVIRONMENT, RanksOnHosts
from tutti.launch.recovery import Replaced
from tutti.launch.signals import SignalWatch, suspended_together
from tutti.launch.start import start
from tutti.launch.stop_request import Stopping

HERE = Path(__file__).parent
LIMIT_S = 20.0
WHEEL = Mpirun("/venv/bin/mpirun", own=True, open_mpi=True)


def test_the_command_names_hosts_ranks_and_what_reaches_every_host() -> None:
    line = command_line(WHEEL, (Host("a", 4), Host("b", 2)), ["TUTTI_JOB"], ["--display", "map"])
    text = " ".join(line)
    assert text.startswith("/venv/bin/mpirun --host a:4,b:2 -n 6")
    assert "-x TUTTI_JOB" in text
    assert text.endswith(f"--display map {sys.executable} -P -m tutti.launch.mpi_rank")
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)


def test_mpich_gets_its_own_options() -> None:
    line = command_line(Mpirun("mpirun", own=False, open_mpi=False), (Host("a", 4),), ["A", "B"], [])
    assert line[1:7] == ["-hosts", "a:4", "-n", "4", "-genvlist", "A,B"]


def test_the_wheel_is_told_its_components_and_the_user_has_the_last_word() -> None:
    one, two = (Host("a", 2),), (Host("a", 2), Host("b", 2))
    assert settings(WHEEL, one, {})["OMPI_MCA_btl"] == "self,sm"
    assert settings(WHEEL, two, {})["OMPI_MCA_btl"] == "self,sm,tcp"
    assert "OMPI_MCA_mpi_abort_delay" not in settings(WHEEL, one, {})
    assert settings(WHEEL, two, {})["OMPI_MCA_mpi_abort_delay"] == "1"
    assert "OMPI_MCA_btl" not in settings(WHEEL, two, {"OMPI_MCA_btl": "tcp,self"})


def test_waiting_ranks_yield_where_they_outnumber_the_cores() -> None:
    many = len(os.sched_getaffinity(0)) + 1
    assert settings(WHEEL, (Host("localhost", many),), {})["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in settings(WHEEL, (Host("localhost", 1),), {})


def test_an_mpi_of_the_site_is_told_nothing() -> None:
    assert settings(Mpirun("/opt/mpi/mpirun", own=False, open_mpi=True), (Host("a", 2),), {}) == {}


def test_without_mpirun_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpirun.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'tutti\[mpi\]'"):
        find_mpirun()


def test_messages_arrive_whole_and_only_from_those_who_know_the_token() -> None:
    channel = MpirunChannel(b"payload")
    try:
        address = channel.address
        liveness = LivenessAddress(("127.0.0.1",), 1, "00", 3)
        start = MpiStart("m:f", None, None, address, ["a b"], [], 9, FileAddress.of(0), liveness)
        assert pickle.loads(pickle.dumps(start)) == start
        assert address.payload_here() == b"payload"
        assert (address.is_here(), address.process) == (True, os.getpid())
        stranger = replace(address, token="00" * 16)
        assert (stranger.payload_here(), stranger.send(RankStarted(0, ()))) == (None, False)
        big = Report(0, 1.0, value=b"x" * 3_000_000)
        assert address.send(RankStarted(1, ("/dev/shm/x",)))
        assert address.send(big)
        assert channel.messages() == [RankStarted(1, ("/dev/shm/x",)), big]
    finally:
        channel.close()
    assert address.payload_here() is None


def test_where_no_report_can_come_from_the_exit_code_says_what_happened() -> None:
    killed = "prterun noticed that process rank 3 with PID 7 on node a exited on\nsignal 11 (Segfault)."
    with pytest.raises(UserError, match="message stands above"):
        outcome([], 2, "")
    with pytest.raises(TuttiError, match="exit code 7"):
        outcome([], 7, "")
    with pytest.raises(PeerLost, match="lost rank 3: killed by signal 11"):
        outcome([], 139, killed)
    assert outcome([], 0, "") is None


def test_a_lost_host_is_an_error_although_mpirun_ends_with_exit_code_0() -> None:
    said = (
        "PRTE has lost communication with a remote daemon.\n\n"
        "  HNP daemon   : [prterun-a-2673@0,0] on node a\n"
        "  Remote daemon: [prterun-a-2673@0,1] on node b\n\nThis is usually due to"
    )
    with pytest.raises(TuttiError, match="lost host b: "):
        outcome([], 0, said)


def test_mpirun_that_cannot_pass_on_output_which_nobody_reads_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpirun_outcome, "output_closed", lambda: True)
    with pytest.raises(OutputClosed):
        outcome([], 1, "prterun: SIGPIPE detected - aborting")


@needs_mpirun
@pytest.mark.mpi
def test_the_ranks_get_a_large_payload_and_the_result_comes_back() -> None:
    payload = b"x" * (LARGEST_IN_ENVIRONMENT + 1)
    placement = place_ranks(hosts="localhost:2")
    ranks = start("tests.launch.entries:describe", payload, placement)
    assert isinstance(ranks, list)
    local = place_ranks(2)
    for rank, one in enumerate(ranks):
        assert (one["rank"], one["size"], one["payload"], one["launcher"]) == (rank, 2, payload, "MPIRUN")
        assert (one["threads"], one["joined"], one["nested"]) == (local.threads, True, 2)
        assert not local.cores or tuple(one["cores"]) == local.cores[rank]
    assert wait_until_gone(one["pid"] for one in ranks) == []


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks come with torch imported, which takes seconds in those of a user."""
    monkeypatch.setattr(ranks_on_hosts, "command_line", forked_mpi_ranks())


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
def test_an_exception_comes_back_and_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="seven is not a colour") as caught:
        start("tests.launch.entries:fail", str(tmp_path).encode(), place_ranks(hosts="localhost:3"))
    assert time.monotonic() - float((tmp_path / "when").read_text()) < LIMIT_S
    assert caught.value.rank == 1
    assert wait_until_gone(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)) == []


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
def test_a_user_error_stays_what_it_is() -> None:
    with pytest.raises(BadData, match=r"^the labels are 12"):
        start("tests.launch.entries:bad_data", b"", place_ranks(hosts="localhost:2"))


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
def test_a_killed_rank_is_named() -> None:
    # Either mpirun says so first, which knows the signal, or the other rank, which does not.
    with pytest.raises(PeerLost) as caught:
        start("tests.launch.entries:die", b"kill", place_ranks(hosts="localhost:2"))
    assert caught.value.ranks == [1]


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
@pytest.mark.timeout(90)
def test_ranks_that_wait_in_the_start_of_mpi_for_one_that_died_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUTTI_MPIRUN_ARGS", "--with-ft ulfm")
    monkeypatch.setattr(ranks_on_hosts, "START_S", 8)
    threading.Thread(target=kill_first_rank, daemon=True).start()
    with pytest.raises(PeerLost, match="lost rank 0: it ended before it was done"):
        start("tests.launch.entries:describe", b"", place_ranks(hosts="localhost:2"))


def kill_first_rank() -> None:
    """Kill rank 0 of the job that this process is about to start, before MPI has started in it."""
    while True:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "mpi_rank" in child.cmdline()[-1] and child.environ().get("OMPI_COMM_WORLD_RANK") == "0":
                    return child.kill()  # A witness is deaf to SIGTERM, and takes its rank with it.
        time.sleep(0.01)


@needs_mpirun
@pytest.mark.mpi
def test_a_launcher_that_was_killed_is_what_is_named() -> None:
    with pytest.raises(TuttiError, match=r"mpirun\b.*killed by signal 9 \(SIGKILL\)"):
        outcome([], -9, "")


def test_a_rank_that_failed_on_another_host_is_named_with_it() -> None:
    with closing(LivenessWatch(2, 3, elsewhere=False)) as watch:
        watch.ends = [RankEnd(1, 1.0, False, FAILED), RankEnd(0, 1.1, False, DONE)]
        with pytest.raises(TuttiError, match=r"^rank 1 failed on host b; what it said stands above$"):
            outcome([], 1, "", watch, [Host("a", 1), Host("b", 1)])


def test_a_host_without_room_for_mpirun_is_told_what_to_do() -> None:
    with pytest.raises(TuttiError, match=r"ended with exit code 213.*make room.*df /tmp"):
        outcome([], 213, "")


@pytest.mark.timeout(60)
def started_as(
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    placement: Placement | None = None,
    *,
    goes_on: bool = False,
) -> RanksOnHosts:
    """Ranks whose mpirun is a shell program."""
    fake = Mpirun("mpirun", own=False, open_mpi=True)
    monkeypatch.setattr(ranks_on_hosts, "find_mpirun", lambda: fake)
    monkeypatch.setattr(ranks_on_hosts, "command_line", lambda *_, **__: ["bash", "-c", program])
    placement = placement or place_ranks(1, hosts="localhost:1")
    return RanksOnHosts("package:entry", b"", placement, goes_on=goes_on)


def test_the_end_of_mpirun_is_the_end_of_the_job_even_if_its_stderr_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = started_as(monkeypatch, "printf 'last words\\n\\0' >&2; sleep 300 & exit 7")
    with SignalWatch() as signals, ranks:
        assert ranks.wait(Stopping(signals), None, None, None) == (7, "last words\n")


def test_ranks_are_ended_when_others_take_over_though_something_is_said_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = started_as(monkeypatch, "while :; do echo said >&2; sleep 0.05; done")
    with SignalWatch() as signals, ranks:
        returncode, said = ranks.wait(Stopping(signals), None, None, lambda: True)
        with pytest.raises(Replaced):
            ranks.result(returncode, said)


def test_an_mpirun_that_starts_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = started_as(monkeypatch, "sleep 300")
    with SignalWatch() as signals, ranks:
        assert ranks.wait(Stopping(signals), None, 0.1, None) == (None, "")
    assert ranks.hangs


@needs_mpirun
@pytest.mark.mpi
def test_what_reaches_a_silent_host_ends_with_the_mpirun_that_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, started = tmp_path / "agent", tmp_path / "started"
    agent.write_text(f"#!/bin/sh\necho $$ > {agent}-pid\nmv {agent}-pid {started}\nsleep 300\n")
    agent.chmod(0o755)
    monkeypatch.setenv("TUTTI_MPIRUN_ARGS", f"--prtemca plm_ssh_agent {agent}")
    assert mpirun.answering(["node7.invalid"], over=started.exists) == []
    assert wait_until_gone([int(started.read_text())]) == []


def test_another_mpirun_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = iter(["sleep 300", "exit 7"])
    started_as(monkeypatch, "").__exit__()
    monkeypatch.setattr(ranks_on_hosts, "command_line", lambda *_, **__: ["bash", "-c", next(tries)])
    monkeypatch.setattr(ranks_on_hosts, "FIRST_S", 0.1)
    with pytest.raises(LauncherLost, match="mpirun ended with exit code 7"):
        ranks_on_hosts.run_on_hosts("package:entry", b"", place_ranks(1, hosts="localhost:1"))
    assert "started no rank within 0.1 s; another one is tried" in capfd.readouterr().err


@needs_mpirun
@pytest.mark.mpi
def test_hosts_are_asked_whether_anything_can_be_started_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, asked = tmp_path / "agent", tmp_path / "asked"
    agent.write_text(f"#!/bin/sh\necho $1 >> {asked}\nexit 3\n")
    agent.chmod(0o755)
    monkeypatch.setenv("TUTTI_MPIRUN_ARGS", f"--prtemca plm_ssh_agent {agent}")
    assert mpirun.answering(["localhost", "node7.invalid"]) == ["localhost"]
    assert set(asked.read_text().split()) == {"node7.invalid"}
    assert len(asked.read_text().split()) > 1
    assert "host node7.invalid does not answer: mpirun ended with" in capsys.readouterr().err


def test_a_host_is_given_as_long_to_answer_as_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, launcher = tmp_path / "busy", tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\n[ ! -e {busy} ] || exec sleep 600\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: Mpirun(str(launcher), own=False, open_mpi=True))
    busy.touch()
    assert mpirun.answering(["node7"], 0.1) == []
    said = "tutti: host node7 does not answer: mpirun has started nothing there within 0.1 s\n"
    assert capsys.readouterr().err == said
    busy.unlink()
    assert mpirun.answering(["node7"], LIMIT_S) == ["node7"]


@pytest.mark.parametrize(
    "before", [["exec sleep 600"], ["exit 7", "exec sleep 600"], ["exec sleep 600", "exit 7"] * 2]
)
def test_an_mpirun_that_hangs_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    tries, launcher = tmp_path / "tries", tmp_path / "mpirun"
    cases = "".join(f"{number}) {does} ;;\n" for number, does in enumerate(before, start=1))
    launcher.write_text(f"#!/bin/sh\necho >> {tries}\ncase $(wc -l < {tries}) in\n{cases}esac\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: Mpirun(str(launcher), own=False, open_mpi=True))
    monkeypatch.setattr(mpirun, "HASTE_S", 0.5)
    assert mpirun.answering(["node7"], LIMIT_S) == ["node7"]


def test_a_host_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_MPIRUN_ARGS", "--prtemca plm_ssh_agent /bin/false")
    with pytest.raises(TuttiError, match="mpirun ended with exit code"):
        start("tests.launch.entries:describe", b"", place_ranks(hosts="no-such-host.invalid:1"))


def test_ctrl_z_stops_what_the_terminal_does_not_reach_and_it_goes_on_with_the_program() -> None:
    reading, writing = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            with suspended_together(lambda signum: os.write(writing, f"{signum:d} ".encode())):
                os.kill(os.getpid(), signal.SIGTSTP)
        finally:
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(program, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.read(reading, 99) == b"%d " % signal.SIGTSTP
    os.kill(program, signal.SIGCONT)
    assert os.waitpid(program, 0)[1] == 0
    assert os.read(reading, 99) == b"%d " % signal.SIGCONT
    os.close(reading)


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("whom", "signum", "returncode"),
    [
        ("program", signal.SIGTERM, 143),
        ("program", signal.SIGKILL, -9),
        ("program and guard", signal.SIGKILL, -9),
        ("mpirun", signal.SIGKILL, 1),
    ],
)
def test_signals_leave_nothing_behind(whom: str, signum: int, returncode: int, tmp_path: Path) -> None:
    # Who looks for the guard or for mpirun needs those of a user's program.
    python = interpreter(starts_ranks=True) if whom == "program" else [sys.executable]
    with (tmp_path / "stderr").open("w") as stderr:
        program = subprocess.Popen([*python, HERE / "supervised.py", tmp_path, "localhost:2"], stderr=stderr)
    pids: list[int] = []
    try:
        wait_for_files(tmp_path / f"rank-{rank}" for rank in range(2))
        notes = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        pids = [note[who] for note in notes for who in ("rank", "child")]
        if "guard" in whom:
            os.kill(guard_of(program.pid), signum)
        os.kill(notes[0]["launcher"] if whom == "mpirun" else program.pid, signum)
        assert program.wait(timeout=60) == returncode
        assert wait_until_gone([*pids, notes[0]["launcher"]]) == []
        segments = [Path(segment) for note in notes for segment in note["segments"]]
        assert segments, "the MPI library makes files in /dev/shm"
        assert not [segment for segment in segments if segment.exists()]
    finally:
        program.kill()
        program.wait()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


def guard_of(program: int) -> int:
    """The process that looks after what a program leaves running."""
    children = [child for child in psutil.Process(program).children() if guard.__file__ in child.cmdline()]
    return children[0].pid


def under_mpirun(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = find_mpirun()
    hosts = (Host("localhost", 2),)
    command = command_line(found, hosts, [], [])
    command[command.index(sys.executable) :] = [*interpreter(), str(HERE / "in_mpi.py"), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **settings(found, hosts, os.environ)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@needs_mpirun
@pytest.mark.mpi
def test_under_the_users_mpirun_the_entry_is_called_in_place() -> None:
    done = under_mpirun("start", "world_size", "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result 2") == 2
    assert done.stdout.count("2 ranks x ") == 1, "rank 0 alone announces the plan"
    assert "started by mpirun" in done.stdout


@needs_mpirun
@pytest.mark.mpi
def test_under_the_users_mpirun_a_user_error_is_said_once() -> None:
    done = under_mpirun("start", "bad_data", "")
    assert done.returncode == 2
    assert done.stderr.count("tutti: error: the labels are 12, expected 0 to 9; check the file") == 1
    assert "Traceback" not in done.stderr


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "said"),
    [("raise", "ValueError: seven is not a colour"), ("exit", "tutti: error: lost rank 1: it left")],
)
def test_a_rank_that_ends_early_in_a_loop_of_ones_own_ends_the_job(how: str, said: str) -> None:
    done = under_mpirun("join", how)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
    assert "MPI_ABORT" not in done.stderr, "a page of MPI's would hide what has been said"


UNHEARD = """
import os
from tutti.launch import mpi_rank
mpi_rank.FAREWELL_S = 0
mpi_rank.end_with_daemon = lambda: os._exit(9)
mpi_rank._run = lambda start, connection: os._exit(8)
mpi_rank.main()
"""


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_elsewhere_that_cannot_be_heard_ends_if_others_take_over(
    goes_on: bool,
) -> None:
    with closing(MpirunChannel(b"")) as channel:
        address = replace(channel.address, token="00" * 16)  # That of a process elsewhere.
        nobody = LivenessAddress(("127.0.0.1",), 1, "00", 3)
        job = MpiStart("m:f", 1, b"", address, [], [], 9, FileAddress.of(0), nobody, goes_on=goes_on)
        start = base64.urlsafe_b64encode(pickle.dumps(job)).decode()
        words, environment = [sys.executable, "-c", UNHEARD], {**os.environ, START: start}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == (9 if goes_on else 8), done.stderr
    assert ("cannot reach port 1 of 127.0.0.1: is there a firewall?" in done.stderr) == goes_on


@pytest.mark.parametrize("answers", [False, True])
def test_a_host_of_which_no_rank_has_begun_is_asked_for_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    asked = tmp_path / "asked"

    def answering(hosts: Sequence[str], patience_s: float, over: Callable[[], bool]) -> list[str]:
        assert hosts == ["elsewhere.invalid"]
        asked.touch()
        return hosts if answers else []

    monkeypatch.setattr(ranks_on_hosts, "answering", answering)
    monkeypatch.setattr(ranks_on_hosts, "ASK_S", 0.0)
    waits = f"while [ ! -e {asked} ]; do sleep 0.05; done; exit 7" if answers else "exec sleep 300"
    hosts = place_ranks(2, hosts="localhost:1,elsewhere.invalid:1")
    with SignalWatch() as signals, started_as(monkeypatch, waits, hosts, goes_on=True) as ranks:
        returncode, said = ranks.wait(Stopping(signals), None, None, None)
        with pytest.raises(PeerLost) as caught:
            ranks.result(returncode, said)
    assert returncode == (7 if answers else None)
    lost = "lost host elsewhere.invalid: no rank of it has begun, and it cannot be reached any more"
    assert (str(caught.value) == lost) == (not answers)
