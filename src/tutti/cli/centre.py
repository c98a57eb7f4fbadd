"""`tutti centre`."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event
from typing import Final

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.registry import part
from tutti.terminal import warn_on_stderr

SAVE_S: Final = 60.0
"""Seconds between two looks whether there is something to save."""


@part("centre")
class CentreCommand(Command):
    """Keep the weights for workers that come and go.

    Each worker is a run of its own, started on any machine at any time with '--strategy async_diloco
    --strategy.centre HOST:PORT'. The first one gives the weights, later ones take them. A worker that is
    lost, stopped or cut off delays no other, and comes back by itself.

    The centre writes its state every minute and at SIGTERM or Ctrl-C, and goes on from it. Centre and workers
    need the same key; the connections are authenticated by it, but not encrypted.
    """

    aim = "train a network"
    example = "tutti centre --listen 10.0.0.1:7070 --key key.txt --keep centre.safetensors"

    @override
    def define(self, parser: Parser) -> None:
        parser.option("--listen", "where it listens", "HOST:PORT", required=True)
        parser.option(
            "--keep", "file of its state; if it is there, the centre goes on from it", "FILE", required=True
        )
        parser.option("--key", "file with the key; by default TUTTI_CENTRE_KEY is the key", "FILE", "")
        parser.option(
            "--workers",
            "outer gradients for a step of the momentum; by default one for each worker that is connected",
            "N",
            0,
            type=int,
        )

    @override
    def run(self, words: Words) -> int:
        own, ended = words.own, Event()
        if own.workers < 0:
            raise BadOption(f"--workers is {own.workers}; give a number from 1, or leave it out")
        # Torch is imported here, and not for the help of all commands.
        from tutti.parameter_server.remote_server import RemoteServer
        from tutti.parameter_server.wire import read_key

        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: ended.set())
        server = RemoteServer(read_key(own.key), Path(own.keep), own.workers)
        print(f"centre at {server.listen(own.listen)}, {server.version} messages so far", flush=True)
        while not ended.wait(SAVE_S):
            try:
                server.save()
            except OSError as error:
                warn_on_stderr(f"cannot write {own.keep}: {error.strerror}; trying again in a minute")
        server.close()
        server.save()
        print(f"{own.keep}: {server.version} messages", flush=True)
        return 0
