"""A centre of its own: connections, workers and the centre itself are lost and come back."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest
import torch
from torch import nn, optim

from tests.parameter_server.network import TO_CENTRE, TO_WORKER, Network
from tutti.cli.main import main
from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import BadCheckpoint, BadModel, BadOption, PeerLost
from tutti.parameter_server import remote
from tutti.parameter_server.base import Push, Receipt, Slot
from tutti.parameter_server.remote import RemoteCentre, RemoteServer, read_key
from tutti.parameter_server.rules import DelayedNesterovRule
from tutti.records.folder_lock import FolderLock
from tutti.replica import Replica
from tutti.strategies import AsyncDiLoCo, Clip

KEY = b"a key of the tests"


def model(value: float, outputs: int = 2) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, outputs), nn.Conv2d(2, 2, 2).double())
    for parameter in module.parameters():
        parameter.data.fill_(value)
    return module.to(memory_format=torch.channels_last)


class Member:
    """A worker with all weights equal, which brings equal values: the centre's are equal, too."""

    all: ClassVar[list[Member]] = []

    def __init__(self, address: str, value: float = 0.0, *, delay: int = 1, key: bytes = KEY) -> None:
        self.replica = Replica(model(value))
        settings = 1.0, 0.5 * (delay > 1), delay
        comm = HostCommunicator.alone()
        self.centre = RemoteCentre(comm, self.replica.flats, settings, address, key)
        self.all.append(self)

    def exchange(self, value: float) -> Receipt:
        message = [torch.full_like(flat.weights, value) for flat in self.replica.flats]
        return self.centre.exchange(message, [flat.weights for flat in self.replica.flats])

    @property
    def value(self) -> float:
        found = {
            float(one)
            for flat in self.replica.flats
            for span in flat.spans
            for one in flat.weights[span].unique()
        }
        assert len(found) == 1
        return found.pop()

    def come_back(self) -> None:
        wait_until(lambda: self.centre.ready)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.fixture
def server(tmp_path: Path) -> RemoteServer:
    return RemoteServer(KEY, tmp_path / "centre.safetensors")


@pytest.fixture
def network(server: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(remote, "MOST_PAUSE_S", 0.1)
    monkeypatch.setenv("TUTTI_CENTRE_KEY", KEY.decode())
    network = Network(server.listen("127.0.0.1:0"))
    yield network
    for member in Member.all:
        member.centre.close()
    Member.all.clear()
    network.close()


def test_the_first_worker_gives_the_weights_and_later_ones_take_them(network: Network) -> None:
    first, second = Member(network.address, 5.0), Member(network.address, 7.0)
    assert (first.value, second.value) == (5.0, 5.0)
    assert first.exchange(2.0).staleness == 0
    receipt = second.exchange(1.0)
    assert (receipt.staleness, second.value, second.centre.version) == (1, 2.0, 2)
    assert receipt.bytes_sent == sum(flat.weights.nbytes for flat in second.replica.flats)
    weights = [flat.weights for flat in first.replica.flats]
    first.centre.read(weights)
    assert first.value == 2.0


@pytest.mark.parametrize("lost", [TO_CENTRE, TO_WORKER])
def test_a_message_that_is_cut_off_is_applied_once(network: Network, server: RemoteServer, lost: str) -> None:
    worker, other = Member(network.address), Member(network.centre)
    worker.exchange(1.0)
    network.loses = lost
    receipts: list[Receipt] = []
    exchanging = Thread(target=lambda: receipts.append(worker.exchange(2.0)))
    exchanging.start()
    assert network.lost.wait(60)
    assert other.exchange(10.0).wait_s < 30  # nobody waits for that
    network.cut()
    exchanging.join()
    assert (receipts[0].staleness, worker.value) == (None, -1.0)  # it goes on by itself
    worker.come_back()
    worker.exchange(4.0)
    assert worker.value == -17.0
    assert server.version == (3 if lost == TO_CENTRE else 4)


def test_a_message_from_before_the_worker_rejoined_is_not_applied(
    network: Network, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sent, send = Member(network.address), Event(), remote._send

    def note(*message: Any) -> int:
        nbytes = send(*message)
        sent.set()
        return nbytes

    network.holds = TO_CENTRE
    monkeypatch.setattr(remote, "_send", note)
    exchanging = Thread(target=worker.exchange, args=(2.0,))
    exchanging.start()
    assert sent.wait(60)
    assert network.lost.wait(60)
    network.cut(both=False)
    exchanging.join()
    worker.come_back()
    network.release()
    worker.exchange(4.0)
    assert (worker.value, server.version) == (-6.0, 1)


def test_numbers_that_are_not_finite_do_not_reach_the_centre(network: Network, server: RemoteServer) -> None:
    worker = Member(network.address)
    for value in (1.0, float("nan"), float("inf"), 2.0):
        worker.exchange(value)
    assert (worker.value, server.version) == (-3.0, 2)


def test_a_centre_outlives_an_error_of_a_connection(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def failing(listener: socket.socket) -> tuple[socket.socket, Any]:
        end = accept(listener)
        if errors:
            end[0].close()
            raise errors.pop()
        return end

    monkeypatch.setattr(socket.socket, "accept", failing)
    for value in (3.0, 4.0):
        assert Member(network.centre, value).value == 3.0


def test_two_centres_do_not_write_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FolderLock(tmp_path, name=".c.lock"):
        assert main(["centre", "--listen", "127.0.0.1:0", "--keep", str(tmp_path / "c")]) == 2
    assert "another centre writes" in capsys.readouterr().err


def test_a_silent_centre_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE_S", 1)
    worker = Member(network.address)
    network.loses = TO_WORKER
    assert worker.exchange(1.0).staleness is None
    network.cut()
    worker.come_back()
    worker.exchange(1.0)
    assert worker.value == -2.0


def by_hand(values: list[float], delay: int) -> float:
    """Return the centre after some messages, which begins at zero."""
    centre, slot = torch.zeros(1), Slot(0, (slice(0, 1),))
    rule = DelayedNesterovRule([], lr=1.0, momentum=0.5, delay=delay)
    rule.open([centre], [slot], lambda length, dtype: torch.zeros(length, dtype=dtype))
    for value in values:
        rule.apply(Push(0, (centre,), (torch.tensor([value]),), None))
    return float(centre)


@pytest.mark.parametrize("unsaved", [[], [64.0]])
def test_a_centre_resumes_from_its_file(
    network: Network, server: RemoteServer, tmp_path: Path, unsaved: list[float]
) -> None:
    """What came after the file was written is lost with the centre."""
    worker = Member(network.address, delay=4)
    before, after = [4.0, 8.0, 16.0, 32.0, 4.0, 8.0], [16.0, 4.0, 32.0]
    for value in before:
        worker.exchange(value)
    server.save()
    for value in unsaved:
        worker.exchange(value)
    network.down = True
    network.cut()
    again = RemoteServer(KEY, tmp_path / "centre.safetensors")
    network.centre = again.listen("127.0.0.1:0")
    worker.exchange(after[0])  # It finds the connection lost, and is added to the next one.
    network.down = False
    worker.come_back()
    worker.exchange(0.0)
    for value in after[1:]:
        worker.exchange(value)
    assert worker.value == by_hand([*before, *after], delay=4)
    assert again.version == 9


def test_a_worker_gives_its_weights_to_a_centre_without_a_file(network: Network, tmp_path: Path) -> None:
    worker = Member(network.address, 1.0)
    worker.exchange(3.0)
    network.cut()
    network.centre = RemoteServer(KEY, tmp_path / "other").listen("127.0.0.1:0")
    worker.exchange(5.0)  # It finds the connection lost.
    worker.come_back()
    worker.exchange(2.0)
    assert (worker.value, worker.centre.version) == (-2.0, 0)
    worker.exchange(2.0)
    assert (worker.value, worker.centre.version) == (-4.0, 1)


@pytest.mark.parametrize(("workers", "members", "expected"), [(0, 1, -8.0), (0, 2, -4.0), (4, 2, -2.0)])
def test_the_number_of_workers_is_the_delay(
    tmp_path: Path, workers: int, members: int, expected: float
) -> None:
    address = RemoteServer(KEY, tmp_path / "centre", workers).listen("127.0.0.1:0")
    worker, *_ = [Member(address, delay=0) for _ in range(members)]
    worker.exchange(8.0)
    assert worker.value == expected


def test_a_workers_round_continues_without_the_centre(network: Network, server: RemoteServer) -> None:
    """Every move reaches the centre, in fewer messages."""
    strategy = AsyncDiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, centre=network.address)
    replica = Replica(model(0.0))
    optimizer = optim.SGD(replica.module.parameters(), lr=1.0)
    worker = strategy.worker(replica, HostCommunicator.alone(), optimizer, Clip())
    steps = 0

    def step() -> None:
        nonlocal steps
        for flat in replica.flats:
            flat.grads.fill_(1.0)
        worker.step()
        steps += 1

    step()
    network.down = True
    network.cut()
    for _ in range(5):
        step()
    assert server.version == 1
    network.down = False
    wait_until(lambda: step() or server.version == 2)
    worker.finish()
    assert {
        float(value) for flat in replica.flats for span in flat.spans for value in flat.weights[span]
    } == {-float(steps)}


def test_a_worker_that_ends_without_the_centre_says_so(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Member(network.address, 1.0)
    monkeypatch.setattr(remote, "PATIENCE_S", 0.3)
    network.down = True
    network.cut()
    worker.exchange(1.0)
    worker.centre.push([flat.weights for flat in worker.replica.flats])
    worker.centre.read([flat.weights for flat in worker.replica.flats])
    worker.centre.close()
    said = capsys.readouterr().err
    assert "does not get this worker's last batches" in said
    assert "this worker's own weights" in said
    assert worker.value == 1.0


def test_a_centre_that_is_not_there_is_named(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.3)
    network.down = True
    with pytest.raises(PeerLost, match=f"tutti centre --listen {network.address} --keep FILE"):
        Member(network.address)
    assert "trying again, for 0.3 s if this run has not begun" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["host", ":7070", "host:port", "host:70000"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(BadOption, match=f"'{address}' is no address of a centre; give HOST:PORT"):
        Member(address)


def test_others_are_refused(network: Network) -> None:
    worker = Member(network.address)
    with pytest.raises(BadOption, match="has another key"):
        Member(network.address, key=b"another key of the tests")
    replica = Replica(model(0.0, outputs=4))
    with pytest.raises(
        BadModel, match=r"'0.weight', \[2, 3\], 'torch.float32', 'rows'\] where this has .*\[4, 3\]"
    ):
        RemoteCentre(HostCommunicator.alone(), replica.flats, (1.0, 0.0, 1), network.address, KEY)
    worker.exchange(1.0)
    assert worker.value == -1.0


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_key_is_needed(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUTTI_CENTRE_KEY", raising=False)
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOption, match="key"):
        read_key(str(file))
    with pytest.raises(BadOption, match="at least 16 characters"):
        read_key("")
    monkeypatch.setenv("TUTTI_CENTRE_KEY", "0123456789abcdef\n")
    assert read_key("") == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"{}" * 40])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "centre"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="not what 'tutti centre' writes"):
        RemoteServer(KEY, file)
