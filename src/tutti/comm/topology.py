"""Topologies: the links that a message between two hosts takes. Messages contend where they share a port.

switch                       host ─out─► switch ─into─► host
fat-tree:16:4                host ─out─► switch ─up─► core ─down─► switch ─into─► host
shared:8                     8 hosts have one link to the switch together
ring, torus:4x4              hosts have links to their neighbours, and pass on what is for others
sites:2:100mbit:20ms         host ─out─► switch ─up─► wide area ─down─► switch ─into─► host
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from math import prod
from typing import Any, Final

from typing_extensions import override


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Args:
        latency_s: seconds before the first byte of a message arrives.
        bandwidth_bytes_per_s: bytes per second after that; `inf` for none to pay.
        overhead_s: seconds of the processor for a message, at each end.

    Raises:
        ValueError: a negative time, or a bandwidth that is not above zero.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "overhead_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more seconds")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; expected more than 0")

    @property
    def start_s(self) -> float:
        """Seconds of a message without bytes: latency, and the overhead of both ends."""
        return self.latency_s + 2 * self.overhead_s

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that `nbytes` keep the link busy."""
        return nbytes / self.bandwidth_bytes_per_s

    def message_s(self, nbytes: float) -> float:
        """Seconds from the begin of a send until the receiver has the message."""
        return self.start_s + self.transfer_s(nbytes)

    def links(self, *_: object) -> Mapping[Link, int]:
        """Return the links of messages that are under way at once: every rank has one of this kind."""
        return {self: 1}


@dataclass(frozen=True)
class Hop:
    """One end or one stretch of a message's way.

    Args:
        port: what carries one message at a time.
        link: its bandwidth, and the latency from here to the next port.
    """

    port: Hashable
    link: Link


class Topology(ABC):
    """The links between hosts. `str` gives the word that `parse_topology` reads."""

    @abstractmethod
    def route(self, here: int, there: int, size: int, link_of: Callable[[int], Link]) -> tuple[Hop, ...]:
        """Return the ports that a message takes.

        Args:
            here: the number of the sending host.
            there: the number of another host.
            size: how many hosts there are.
            link_of: the link of a host to the network.

        Raises:
            ValueError: the topology has too few hosts.
        """


@dataclass(frozen=True)
class Switch(Topology):
    """All hosts at one switch, which is never the narrowest part."""

    @override
    def __str__(self) -> str:
        return "switch"

    @override
    def route(self, here: int, there: int, size: int, link_of: Callable[[int], Link]) -> tuple[Hop, ...]:
        return Hop(("out", here), link_of(here)), Hop(("into", there), replace(link_of(there), latency_s=0.0))


@dataclass(frozen=True)
class Groups(Switch):
    """Hosts in groups at a switch each; a link leads from each group to the others."""

    @abstractmethod
    def group(self, host: int, size: int) -> int:
        """Return the number of a host's group."""

    @abstractmethod
    def uplink(self, link: Link) -> Link:
        """Return the link of a group, where a host has `link`; its latency is added to that of hosts."""

    @override
    def route(self, here: int, there: int, size: int, link_of: Callable[[int], Link]) -> tuple[Hop, ...]:
        out, into = super().route(here, there, size, link_of)
        first, last = self.group(here, size), self.group(there, size)
        if first == last:
            return out, into
        uplink = self.uplink(link_of(here))
        return out, Hop(("up", first), uplink), Hop(("down", last), replace(uplink, latency_s=0.0)), into


@dataclass(frozen=True)
class FatTree(Groups):
    """Switches of a few hosts each, joined by a core.

    Args:
        hosts: how many hosts a switch has.
        oversubscription: the bandwidth of a switch's hosts together, over that of its link to the core.
    """

    hosts: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.hosts < 1 or not self.oversubscription > 0:
            raise ValueError(f"topology is {self}; expected at least 1 host, and an oversubscription above 0")

    @override
    def __str__(self) -> str:
        return f"fat-tree:{self.hosts}:{self.oversubscription:g}"

    @override
    def group(self, host: int, size: int) -> int:
        return host // self.hosts

    @override
    def uplink(self, link: Link) -> Link:
        return Link(0.0, link.bandwidth_bytes_per_s * self.hosts / self.oversubscription)


@dataclass(frozen=True)
class Shared(Groups):
    """Hosts that share one link to the switch, such as virtual machines of one computer.

    Args:
        hosts: how many hosts share a link. Messages between them do not take it.
    """

    hosts: int

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ValueError(f"topology is {self}; expected at least 1 host at a link")

    @override
    def __str__(self) -> str:
        return f"shared:{self.hosts}"

    @override
    def group(self, host: int, size: int) -> int:
        return host // self.hosts

    @override
    def uplink(self, link: Link) -> Link:
        return Link(0.0, link.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Sites(Groups):
    """Hosts at several places, as many at each, that a wide-area network joins.

    Args:
        sites: how many places there are.
        bandwidth_bytes_per_s: bytes per second of a place's link to the others, each way.
        latency_s: seconds from place to place, added to the latency of hosts.
    """

    sites: int
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise ValueError(f"topology is {self}; expected at least 1 site")
        Link(self.latency_s, self.bandwidth_bytes_per_s)  # checks both

    @override
    def __str__(self) -> str:
        return f"sites:{self.sites}:{bandwidth_text(self.bandwidth_bytes_per_s)}:{time_text(self.latency_s)}"

    @override
    def group(self, host: int, size: int) -> int:
        return host * self.sites // size

    @override
    def uplink(self, link: Link) -> Link:
        return Link(self.latency_s, self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Torus(Topology):
    """Hosts in a grid whose lines are closed to rings; a host has a link to each neighbour, each way.

    A message goes the shorter way round in the last dimension first (dimension-order routing: Dally, Towles
    2004, "Principles and Practices of Interconnection Networks", chapter 8); each link takes its latency.

    Args:
        shape: how many hosts each dimension has.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"topology is {self}; expected at least 1 host in each dimension")

    @override
    def __str__(self) -> str:
        return f"torus:{'x'.join(map(str, self.shape))}"

    @override
    def route(self, here: int, there: int, size: int, link_of: Callable[[int], Link]) -> tuple[Hop, ...]:
        if size > prod(self.shape):
            raise ValueError(
                f"topology is {self}, which has {prod(self.shape)} hosts; expected at least {size}"
            )
        hops = []
        stride = 1
        for length in reversed(self.shape):
            ahead = (there // stride - here // stride) % length
            step = 1 if 2 * ahead <= length else -1
            while (there // stride - here // stride) % length:
                hops.append(Hop(("link", here, stride * step), link_of(here)))
                place = here // stride % length
                here += ((place + step) % length - place) * stride
            stride *= length
        return tuple(hops)


@dataclass(frozen=True)
class Ring(Topology):
    """Hosts in a ring, with a link to each of the two neighbours, each way."""

    @override
    def __str__(self) -> str:
        return "ring"

    @override
    def route(self, here: int, there: int, size: int, link_of: Callable[[int], Link]) -> tuple[Hop, ...]:
        return Torus((size,)).route(here, there, size, link_of)


# Words.

_SECONDS: Final = {"ns": Decimal("1e-9"), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_BYTES: Final = {
    "kbit": Decimal(125),
    "mbit": Decimal(125_000),
    "gbit": Decimal(125_000_000),
    "bit": Decimal("0.125"),
}


def parse_time(text: str) -> float:
    """Return the seconds of a word such as "50us"."""
    return _quantity(text, _SECONDS, "a time such as 50us or 20ms")


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of a word such as "10gbit"."""
    return _quantity(text, _BYTES, "a bandwidth such as 10gbit or 100mbit")


def time_text(seconds: float) -> str:
    """Return the word that `parse_time` reads."""
    return _text(seconds, _SECONDS)


def bandwidth_text(bytes_per_s: float) -> str:
    """Return the word that `parse_bandwidth` reads."""
    return _text(bytes_per_s, _BYTES)


def _quantity(text: str, units: Mapping[str, Decimal], expected: str) -> float:
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        return float(Decimal(text.removesuffix(unit)) * units[unit])
    except (InvalidOperation, KeyError):
        raise ValueError(f"found '{text}'; expected {expected}") from None


def _text(value: float, units: Mapping[str, Decimal]) -> str:
    exact = Decimal(repr(float(value)))
    fitting = [unit for unit in units if units[unit] <= exact]
    unit = max(fitting or units, key=lambda unit: units[unit])
    return f"{(exact / units[unit]).normalize():f}{unit}"


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


TOPOLOGIES: Final[Mapping[str, tuple[type[Topology], tuple[Callable[[str], Any], ...]]]] = {
    "switch": (Switch, ()),
    "fat-tree:16:4": (FatTree, (int, float)),
    "shared:8": (Shared, (int,)),
    "ring": (Ring, ()),
    "torus:4x4": (Torus, (_shape,)),
    "sites:2:100mbit:20ms": (Sites, (int, parse_bandwidth, parse_time)),
}
"""An example of each topology's word: its class, and what reads the parts after the first one."""


def parse_topology(text: str) -> Topology:
    """Return the topology of a word such as "fat-tree:16:4".

    Raises:
        ValueError: there is no such topology, or its numbers are impossible.
    """
    name, *parts = text.split(":")
    example = next((one for one in TOPOLOGIES if one.split(":")[0] == name), None)
    if example is None:
        raise ValueError(f"topology is '{text}'; expected a word such as {', '.join(TOPOLOGIES)}")
    kind, readers = TOPOLOGIES[example]
    try:
        arguments = [read(part) for read, part in zip(readers, parts, strict=True)]
    except ValueError:
        raise ValueError(f"topology is '{text}'; expected a word such as {example}") from None
    return kind(*arguments)
