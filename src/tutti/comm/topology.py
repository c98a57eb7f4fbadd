"""Topologies: the links that a message between two hosts takes. Messages contend where they share a port.

switch                   host ─out─► switch ─into─► host
shared:8                 host ─out─► switch ─up─► switch of all ─down─► switch ─into─► host
fat-tree:16:4            the same, with a wider link up and down; 4 is the oversubscription
sites:2:100mbit:20ms     the same, with a wide-area network in the middle
ring, torus:4x4          hosts have links to their neighbours, and pass on what is for others
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from math import prod
from typing import Any, ClassVar, Final

from typing_extensions import override


@dataclass(frozen=True)
class Link:
    """One kind of link."""

    latency_s: float  # seconds before the first byte of a message arrives
    bandwidth_bytes_per_s: float  # bytes per second after that; `inf` for none to pay
    overhead_s: float = 0.0  # seconds of the processor for a message, at each end

    def __post_init__(self) -> None:
        for name in ("latency_s", "overhead_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more seconds")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; expected more than 0")

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that `nbytes` keep the link busy."""
        return nbytes / self.bandwidth_bytes_per_s

    def message_s(self, nbytes: float) -> float:
        """Seconds from the begin of a send until the receiver has the message."""
        return self.latency_s + 2 * self.overhead_s + self.transfer_s(nbytes)


@dataclass(frozen=True)
class Hop:
    """A port, which carries one message at a time; its bandwidth, and the latency from here to the next."""

    port: Hashable
    link: Link


@lru_cache(maxsize=1024)
def _tail(link: Link) -> Link:
    """Return a link that a message leaves without latency."""
    return replace(link, latency_s=0.0)


LinkOf = Callable[[int], Link]
"""The link between a host and the network."""


@dataclass(frozen=True)
class Switch:
    """All hosts at one switch, which is never the narrowest part. The base of all topologies."""

    form: ClassVar[str] = "switch"

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if not all(number > 0 for number in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"topology is {self}; expected numbers above 0")

    @override
    def __str__(self) -> str:
        return self.form.format(self)

    def group(self, host: int, size: int) -> int:
        """Return the number of a host's group; a message that leaves a group takes two links more."""
        return 0

    def uplink(self, link: Link) -> Link:
        """Return the link of a group, where `link` is a host's; its latency comes on top."""
        return _tail(link)

    def route(self, here: int, there: int, size: int, link_of: LinkOf) -> tuple[Hop, ...]:
        """Return the ports that a message from `here` takes to `there`, two of `size` hosts.

        Raises:
            ValueError: the topology has too few hosts.
        """
        out, into = (
            Hop(("out", here), link_of(here)),
            Hop(("into", there), _tail(link_of(there))),
        )
        first, last = self.group(here, size), self.group(there, size)
        if first == last:
            return out, into
        up = self.uplink(link_of(here))
        return out, Hop(("up", first), up), Hop(("down", last), _tail(up)), into


@dataclass(frozen=True)
class Shared(Switch):
    """Groups of `hosts` hosts that share one link to the others, such as virtual machines of a computer."""

    form = "shared:{0.hosts}"
    hosts: int

    @override
    def group(self, host: int, size: int) -> int:
        return host // self.hosts


@dataclass(frozen=True)
class FatTree(Shared):
    """Switches of `hosts` hosts; these have `oversubscription` times the bandwidth of their switch's link."""

    form = "fat-tree:{0.hosts}:{0.oversubscription:g}"
    oversubscription: float

    @override
    def uplink(self, link: Link) -> Link:
        return Link(0.0, link.bandwidth_bytes_per_s * self.hosts / self.oversubscription)


@dataclass(frozen=True)
class Sites(Switch):
    """Places with equal numbers of hosts. A link leads from each to the others; its latency comes on top."""

    sites: int
    bandwidth_bytes_per_s: float
    latency_s: float

    @override
    def __str__(self) -> str:
        speed, latency = in_units(self.bandwidth_bytes_per_s, BITS), in_units(self.latency_s, TIMES)
        return f"sites:{self.sites}:{speed}:{latency}"

    @override
    def group(self, host: int, size: int) -> int:
        return host * self.sites // size

    @override
    def uplink(self, link: Link) -> Link:
        return Link(self.latency_s, self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Torus(Switch):
    """A grid of hosts, with lines closed to rings, and a link to each neighbour, each way.

    A message goes the shorter way round, in the last dimension first (Dally, Towles 2004, "Principles and
    Practices of Interconnection Networks", chapter 8). It takes the latency of each link. An empty shape is
    one ring of all hosts.
    """

    shape: tuple[int, ...] = ()

    @override
    def __str__(self) -> str:
        return f"torus:{'x'.join(map(str, self.shape))}" if self.shape else "ring"

    @override
    def route(self, here: int, there: int, size: int, link_of: LinkOf) -> tuple[Hop, ...]:
        shape = self.shape or (size,)
        if size > prod(shape):
            raise ValueError(f"topology is {self}, which has {prod(shape)} hosts; expected at least {size}")
        hops = []
        stride = 1
        for length in reversed(shape):
            ahead = (there // stride - here // stride) % length
            step = 1 if 2 * ahead <= length else -1
            for _ in range(min(ahead, length - ahead)):
                hops.append(Hop(("link", here, stride * step), link_of(here)))
                place = here // stride % length
                here += ((place + step) % length - place) * stride
            stride *= length
        return tuple(hops)


TIMES: Final = {"ns": Decimal("1e-9"), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
"""Seconds of each unit."""
BITS: Final = {f"{prefix}bit": Decimal(10**power) / 8 for prefix, power in (("k", 3), ("m", 6), ("g", 9))}
"""Bytes per second of each unit."""


def quantity(text: str, units: Mapping[str, Decimal]) -> float:
    """Return the value of a number with a unit, such as "50us"; raise ValueError for any other text."""
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        return float(Decimal(text.removesuffix(unit)) * units[unit])
    except (InvalidOperation, KeyError):
        raise ValueError(f"found '{text}'; expected a number and a unit: {', '.join(units)}") from None


def in_units(value: float, units: Mapping[str, Decimal]) -> str:
    """Return the text that `quantity` reads."""
    exact = Decimal(repr(float(value)))
    unit = max((unit for unit in units if units[unit] <= exact), key=units.__getitem__, default=[*units][-1])
    return f"{(exact / units[unit]).normalize():f}{unit}"


_READERS: Final[Mapping[str, tuple[type[Switch], tuple[Callable[[str], Any], ...]]]] = {
    "switch": (Switch, ()),
    "fat-tree:16:4": (FatTree, (int, float)),
    "shared:8": (Shared, (int,)),
    "ring": (Torus, ()),
    "torus:4x4": (Torus, (lambda text: tuple(map(int, text.split("x"))),)),
    "sites:2:100mbit:20ms": (Sites, (int, partial(quantity, units=BITS), partial(quantity, units=TIMES))),
}
"""An example of each topology's word: its class, and what reads the parts after the first one."""


def parse_topology(text: str) -> Switch:
    """Return the topology of a word such as "fat-tree:16:4"; raise ValueError if it is none."""
    name, *parts = text.split(":")
    example = next((one for one in _READERS if one.split(":")[0] == name), None)
    if example is None:
        raise ValueError(f"topology is '{text}'; expected a word such as {', '.join(_READERS)}")
    kind, readers = _READERS[example]
    try:
        arguments = [read(part) for read, part in zip(readers, parts, strict=True)]
    except ValueError:
        raise ValueError(f"topology is '{text}'; expected a word such as {example}") from None
    return kind(*arguments)
