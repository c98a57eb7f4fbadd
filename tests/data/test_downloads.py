"""Published files are looked up in TUTTI_DATA, then in the cache, then downloaded and checked."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tutti.data.builtin import given_folder, mnist
from tutti.data.builtin.mnist import IDX_FILES, Published
from tutti.errors import BadData

pytestmark = pytest.mark.timeout(60)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def publish(served, write_idx, images, monkeypatch, tmp_path):
    """Lets 'mnist' be a small data set that is served here; gives the folder, its address and the cache."""
    monkeypatch.delenv("TUTTI_DATA", raising=False)
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    folder, address = served
    x, y = images
    hashes = []
    for name, array in zip(IDX_FILES, (x[:40], y[:40], x[40:], y[40:]), strict=True):
        path = write_idx(folder / f"{name}.gz", np.ascontiguousarray(array))
        hashes.append(hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest())
    monkeypatch.setattr(mnist, "MNIST", Published("mnist", (address,), tuple(hashes), ("a", "b", "c")))
    return folder, address, tmp_path / "cache" / "mnist"


def test_files_are_downloaded_once_into_the_cache(publish, opened, capfd):
    folder, _, cache = publish
    assert len(opened("mnist", validation=0).train) == 40
    assert "train-images-idx3-ubyte.gz" in capfd.readouterr().err
    assert sorted(p.name for p in cache.iterdir()) == sorted(IDX_FILES)
    for file in folder.iterdir():
        file.unlink()
    assert len(opened("mnist", validation=0).test) == 20


def test_changed_content_is_refused_and_not_kept(publish, write_idx):
    folder, _, cache = publish
    write_idx(folder / f"{IDX_FILES[1]}.gz", np.zeros(40, np.uint8))
    with pytest.raises(
        BadData,
        match=r"(?s)'mnist' could not be downloaded.*SHA256 hash .* expected .* but got .*TUTTI_DATA=FOLDER",
    ):
        mnist.MNIST.contents()
    assert [p.name for p in cache.iterdir()] == [IDX_FILES[0]]


@pytest.mark.parametrize("change", [lambda _: b"<html>please log in</html>", lambda content: content[:-20]])
def test_a_file_that_is_not_whole_is_refused(publish, change):
    folder, _, cache = publish
    path = folder / f"{IDX_FILES[0]}.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadData, match=r"(?s)could not be downloaded.*--data digits"):
        mnist.MNIST.contents()
    assert list(cache.iterdir()) == []


def test_the_second_server_is_tried_after_the_first(publish):
    _, address, cache = publish
    both = replace(mnist.MNIST, servers=(address + "gone/", address))
    assert both.downloaded() == cache
    assert sorted(path.name for path in cache.iterdir()) == sorted(IDX_FILES)


def test_without_any_server_the_message_names_the_remedies(publish):
    _, address, _ = publish
    # Port 1 of this machine: nothing listens there.
    none = replace(mnist.MNIST, servers=(address + "gone/", "http://127.0.0.1:1/"))
    with pytest.raises(
        BadData,
        match=r"gone/train-images.*404.*\n  http://127\.0\.0\.1:1/.*\n"
        r".*train-images-idx3-ubyte\.gz, .* into FOLDER/mnist/ and set TUTTI_DATA=FOLDER, "
        r"or use '--data digits'",
    ):
        none.contents()


def test_tutti_data_comes_first_and_may_hold_unpacked_files(publish, monkeypatch, tmp_path, write_idx):
    own = tmp_path / "own" / "mnist"
    monkeypatch.setenv("TUTTI_DATA", str(own.parent))
    with pytest.raises(BadData, match=r"TUTTI_DATA is '.*own', which is no folder"):
        mnist.MNIST.contents()
    own.mkdir(parents=True)
    for name in IDX_FILES:
        write_idx(own / name, np.full((7, 2, 2) if "images" in name else 7, 5, np.uint8))
    assert mnist.MNIST.contents().parts["test"][1].tolist() == [5] * 7


@pytest.mark.mnist
@pytest.mark.parametrize("published", [mnist.MNIST, mnist.FASHION_MNIST])
def test_the_checksums_are_those_of_the_real_files(real_data, published):
    folder = given_folder(published.name)
    for name, sha256 in zip(IDX_FILES, published.sha256, strict=True):
        packed = folder / f"{name}.gz"
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256


def test_the_cache_can_be_read_by_others(publish):
    assert {path.stat().st_mode & 0o777 for path in mnist.MNIST.downloaded().iterdir()} == {0o644}
