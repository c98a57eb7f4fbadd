"""The address of rank 0 where no launcher tells it: it broadcasts its addresses by MPI, the others try them.

rank 0   listens ── its addresses, a port, a token ──▶ all ranks: connect to one address after the other,
                                                       until the answer is that token
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from tutti.errors import UserError

CONNECT_S: Final = 2.0
"""How long an address may take to answer."""


@dataclass(frozen=True)
class Offer:
    """The addresses at which a rank may be reached.

    Attributes:
        addresses: of its host, the likeliest first.
        port: where it listens.
        token: its answer.
    """

    addresses: tuple[str, ...]
    port: int
    token: str


@contextmanager
def listening(interface: str = "") -> Iterator[Offer]:
    """Answer connections to an address of this host, by default to any, while the context lasts."""
    token = secrets.token_hex(16)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(token.encode())

    with socketserver.ThreadingTCPServer((interface, 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Offer(addresses_here(), server.server_address[1], token)
        finally:
            server.shutdown()
            thread.join()


def addresses_here() -> tuple[str, ...]:
    """The IPv4 addresses of this host: first what its name stands for, last those that only it knows."""
    import psutil

    try:
        named = [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        named = []
    of_interfaces = [
        one.address
        for several in psutil.net_if_addrs().values()
        for one in several
        if one.family == socket.AF_INET
    ]
    return tuple(sorted(dict.fromkeys(named + of_interfaces), key=lambda one: one.startswith("127.")))


def reach(offer: Offer) -> str:
    """The first address at which the rank that made the offer answers.

    Raises:
        UserError: it does so at none.
    """
    for address in offer.addresses:
        if _answers(address, offer):
            return address
    raise UserError(
        f"{socket.gethostname()} cannot reach rank 0 at any address of its host "
        f"({', '.join(offer.addresses)}); say which one to take: mpirun -x MASTER_ADDR=ADDRESS ..."
    )


def _answers(address: str, offer: Offer) -> bool:
    try:
        with socket.create_connection((address, offer.port), CONNECT_S) as connection:
            said = connection.recv(len(offer.token), socket.MSG_WAITALL)
    except OSError:
        return False
    return said == offer.token.encode()


def find_first_rank(size: int, port: int) -> tuple[str, int] | None:
    """An address at which this rank reaches rank 0, and a port that is free there (collective over all).

    Args:
        size: how many ranks the launcher started.
        port: on rank 0 one that is free here; of others it does not count.

    Returns:
        Address and port; None if the ranks cannot talk by MPI.

    Raises:
        UserError: a rank reaches rank 0 nowhere; on every rank.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    from tutti.comm.mpi.communicator import from_all, world_place

    rank, found, _ = world_place()
    if found != size:
        return None
    with nullcontext() if rank else listening() as own:
        offer, port = from_all((own, port))[0]
        outcomes = from_all(_outcome(offer))
    for outcome in outcomes:
        if isinstance(outcome, UserError):
            raise outcome
    return outcomes[rank], port


def _outcome(offer: Offer) -> str | UserError:
    try:
        return reach(offer)
    except UserError as error:
        return error
