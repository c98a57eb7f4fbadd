"""`tutti centre`."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event
from typing import Final

from typing_extensions import override

from tutti.cli.command import Command, writable
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.records.folder_lock import FolderInUse, FolderLock
from tutti.registry import part
from tutti.terminal import warn_on_stderr

SAVE_S: Final = 60.0


@part("centre")
class CentreCommand(Command):
    """Keep the weights for workers that come and go.

    Each worker is a separate run with '--strategy async_diloco --strategy.centre HOST:PORT', on any
    machine. The first worker sends its weights, later ones receive them; a lost worker delays no other. The
    centre saves its state every minute and at SIGTERM or Ctrl-C. Nothing is encrypted.
    """

    aim = "train a network"
    example = "tutti centre --listen 10.0.0.1:7070 --key key.txt --keep centre.safetensors"

    @override
    def define(self, parser: Parser) -> None:
        parser.option("--listen", "address to listen at", "HOST:PORT", required=True)
        parser.option("--keep", "file for the state, from which the centre continues", "FILE", required=True)
        parser.option("--key", "file with the key; by default TUTTI_CENTRE_KEY is the key", "FILE", "")
        of = "outer gradients for a step of the momentum; 0: one for each connected worker"
        parser.option("--workers", of, "N", 0, type=int)

    @override
    def run(self, words: Words) -> int:
        own, ended = words.own, Event()
        if own.workers < 0:
            raise BadOption(f"--workers is {own.workers}; give 0 for each that is connected, or more")
        from tutti.parameter_server.remote import RemoteServer, read_key

        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: ended.set())
        keep = writable(Path(own.keep), "--keep")
        try:
            lock = FolderLock(keep.parent, name=f".{keep.name}.lock")
        except FolderInUse as error:
            raise BadOption(
                f"another centre writes {keep}; stop it, or name another file with --keep"
            ) from error
        server = RemoteServer(read_key(own.key), keep, own.workers)
        print(f"centre at {server.listen(own.listen)}, {server.version} messages so far", flush=True)
        while not ended.wait(SAVE_S):
            try:
                server.save()
            except OSError as error:
                warn_on_stderr(f"cannot write {own.keep}: {error.strerror}; trying again in a minute")
        server.save(last=True)
        lock.release()
        print(f"{own.keep}: {server.version} messages", flush=True)
        return 0
