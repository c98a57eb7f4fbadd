"""Data at an address are copied once, and again where they have changed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_data
from tutti.data.remote import SCHEMES, local_copy
from tutti.data.schemas import check_there
from tutti.data.streaming import StreamedPart
from tutti.errors import BadData, BadOption
from tutti.load_object import names_object


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path, images) -> Callable[..., str]:
    """Writes a folder of NPY files into fsspec's memory; returns its address."""
    system, address = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/set"

    def put(**arrays: np.ndarray) -> str:
        for key, array in (arrays or dict(zip(("x_train", "y_train"), images, strict=True))).items():
            np.save(tmp_path / "one.npy", array)
            system.pipe_file(f"{address}/{key}.npy", (tmp_path / "one.npy").read_bytes())
        return address

    return put


def test_data_at_an_address_are_those_of_the_files(cache, store, opened, images):
    found = opened(store(), validation=0)
    assert torch.equal(found.train.inputs[:, 0], torch.from_numpy(images[0]))
    streamed = opened(store(), validation=0, options={"stream": True})
    assert isinstance(streamed.train, StreamedPart)
    assert streamed.fingerprint == found.fingerprint


def test_files_are_copied_once_and_those_that_have_changed_again(cache, store, images, capsys):
    said, address = [], store()
    for change in (False, False, True, False):
        if change:
            store(y_train=images[1] + 1)
        folder = Path(str(local_copy(address)))
        said.append(capsys.readouterr().err.partition(",")[0])
    assert said == ["copying 2 files", "", "copying 1 files", ""]
    assert np.array_equal(np.load(folder / "y_train.npy"), images[1] + 1)


def test_each_host_copies_into_its_own_cache_once(cache, store, capsys):
    address = store()
    VirtualWorld(ranks=4, ranks_per_host=2).run(lambda comm: open_data(address, comm))
    assert capsys.readouterr().err.count("copying") == 1  # Both hosts have one cache here.


def test_a_copy_is_used_where_the_address_cannot_be_reached(cache, store, capsys, monkeypatch):
    address = store()
    folder = local_copy(address)

    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    assert local_copy(address) == folder
    assert "cannot be read (no route to host); its copy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("t#1.csv", "t#1.csv"),
        ("q?x/t.csv", "t.csv"),
        ("a/..", "data"),
    ],
)
def test_a_copy_stays_in_its_place_and_keeps_its_ending(cache, tmp_path, address, name):
    for folder in ("a", "q?x"):
        (tmp_path / "there" / folder).mkdir(parents=True)
        (tmp_path / "there" / folder / "t.csv").write_text("x,y\n1,2\n")
    (tmp_path / "there" / "t#1.csv").write_text("x,y\n1,2\n")
    copy = Path(str(local_copy(f"file://{tmp_path}/there/{address}")))
    assert copy.name == name
    assert copy.parent.parent.parent == cache / "remote"
    assert copy.is_dir() or copy.read_text() == "x,y\n1,2\n"
    assert len(list((cache / "remote").iterdir())) == 1


def test_schemes_are_known_before_any_rank_starts():
    check_there("s3://bucket/folder")
    assert not names_object("s3://bucket/folder")
    with pytest.raises(BadOption, match="begins with http://; data come by s3"):
        check_there("http://host/folder")


class Answers(SimpleHTTPRequestHandler):
    """A server of files, of which those in `broken` stall, end early or are refused."""

    broken = ""
    goes_on = threading.Event()

    def do_GET(self):
        if not self.broken or self.path.partition("?")[0].endswith("/"):
            super().do_GET()
        elif self.broken == "refused":
            self.send_error(403)
        else:
            self.send_response(200)
            if self.broken == "stalled":
                self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            if self.broken == "stalled":
                self.goes_on.wait()

    do_HEAD = SimpleHTTPRequestHandler.do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path, cache, monkeypatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which a server shows it."""
    monkeypatch.setattr("tutti.data.remote.SCHEMES", (*SCHEMES, "http"))
    monkeypatch.setattr(Answers, "broken", "")
    monkeypatch.setattr(Answers, "goes_on", threading.Event())
    folder = tmp_path / "there"
    (folder / "set").mkdir(parents=True)
    (folder / "set" / "x.npy").write_bytes(b"one")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Answers, directory=str(folder)))
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    Answers.goes_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_on_the_web_is_copied_again_where_it_may_have_changed(web, monkeypatch, capsys):
    file = web[0] / "set" / "x.npy"
    for content, time, copied in ((b"one", 1000, 1), (b"one", 1000, 0), (b"new", 2000, 1)):
        file.write_bytes(content)
        os.utime(file, (time, time))
        assert Path(str(local_copy(f"{web[1]}/set/x.npy"))).read_bytes() == content
        assert capsys.readouterr().err.count("copying 1 files") == copied
    monkeypatch.setattr(Answers, "broken", "short")  # no Content-Length, ETag or Last-Modified
    monkeypatch.setattr(Answers, "do_HEAD", Answers.do_GET)
    for _ in range(2):
        assert Path(str(local_copy(f"{web[1]}/set/x.npy"))).read_bytes() == b"half"
        assert "copying 1 files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("refused", "set/x.npy cannot be copied to .*: .*403"),
        ("stalled", r"set/x.npy cannot be copied to .*: nothing has come for 0.2 s; .* try again"),
        ("short", "set/x.npy cannot be copied to .*: 4 of 3 bytes have come"),
    ],
)
def test_a_server_that_fails_is_an_error_and_what_has_come_is_not_used(web, monkeypatch, broken, said):
    monkeypatch.setattr("tutti.data.remote._STALLED_S", 0.2)
    monkeypatch.setattr(Answers, "broken", broken)
    with pytest.raises(BadData, match=said):
        local_copy(f"{web[1]}/set/x.npy")
    monkeypatch.setattr(Answers, "broken", "")
    assert Path(str(local_copy(f"{web[1]}/set/x.npy"))).read_bytes() == b"one"


def test_no_message_has_a_signature_or_a_password(web, capsys, monkeypatch):
    said = []
    local_copy(f"{web[1]}/set/x.npy?signature=SECRET")
    for address in (
        f"{web[1]}/none.npy?signature=SECRET",
        "sftp://me:SECRET@host/set",
        "ftp://me:SECRET@host/",
    ):
        with pytest.raises((BadData, BadOption)) as found:
            local_copy(address)
        said.append(str(found.value))
    assert "404" in said[0]
    assert "has a password in it" in said[1]
    assert "SECRET" not in " ".join([*said, *capsys.readouterr()])


def test_what_has_come_is_kept_where_a_copy_breaks_off(cache, store, monkeypatch, capsys):
    address, memory = store(), type(fsspec.filesystem("memory"))
    whole = memory.get_file

    def fill_up(self, path, to, **options):
        if "y_train" in path:
            Path(to).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, path, to, **options)

    with monkeypatch.context() as broken:
        broken.setattr(memory, "get_file", fill_up)
        with pytest.raises(BadData, match=r"No space left on device; .*TUTTI_CACHE"):
            local_copy(address)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.read_bytes() == b"half"]
    local_copy(address)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "copying 2 files",
        "copying 1 files",
    ]
