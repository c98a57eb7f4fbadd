"""A kind of host, and the network between such hosts. Needs no torch."""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, Field, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from tutti.comm.network import Network
from tutti.errors import BadOption, UnknownName
from tutti.launch.cores import allowed_cores

FOLDER: Final = Path(__file__).with_name("machines")

INCLUDED: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""The names of the machines that come with the package."""

SECTIONS: Final = ("network", "compute", "failures", "input")
"""The sections of a machine's file; a key may be in any of them."""

BETWEEN: Final = "10gbit,50us"
INSIDE: Final = "64gbit,1us"
"""The default links."""


@dataclass(frozen=True)
class Machine:
    """A kind of host; the fields are the keys of its file.

    Raises:
        BadOption: `between` or `inside` cannot be parsed.
    """

    name: str
    source: str  # of the figures, with the year
    ranks_per_host: int
    between: str  # the network between hosts, as for `Network.parse`
    inside: str  # the link between two ranks of a host, in the same form
    price_per_hour: float | None = None  # of a host; None: unknown
    speeds: tuple[float, ...] = (1.0,)  # relative, of the hosts in turn
    flops_per_s: float | None = None  # of a rank; None: the model is timed on this machine
    spread: tuple[float, ...] = (1.0, 1.0)  # equally spaced quantiles of a step's time, over the median
    hours_between: float = inf  # the mean between two failures of a host
    repair_s: float = 600.0  # until a failed host is repaired or replaced
    checkpoint_every_s: float = 600.0
    restart_s: float = 60.0  # from a failure until ranks train again, if no host is missing
    samples_per_s: float = inf  # the most that the input of a rank can read

    def __post_init__(self) -> None:
        _ = self.network

    @property
    def network(self) -> Network:
        """The network of a cluster of such hosts."""
        try:
            inside, between = Network.parse(self.inside), Network.parse(self.between)
        except ValueError as error:
            raise BadOption(f"the network of machine '{self.name}': {error}") from error
        return replace(
            between,
            local_latency_s=inside.latency_s,
            local_bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
        )

    def hosts(self, workers: int) -> list[int]:
        """Return the number of workers on each host; hosts are filled in turn."""
        full, rest = divmod(workers, self.ranks_per_host)
        return [self.ranks_per_host] * full + [rest] * (rest > 0)

    def written(self) -> str:
        """Return the text of a file that `read_machine` reads as this machine."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return "".join(
            f"{key} = {json.dumps(value)}\n" for key, (value, default) in values.items() if value != default
        )


def machine_of(
    given: str | Machine | None, network: str | None = None, price_per_hour: float | None = None
) -> Machine:
    """Return the machine of a name or a TOML file, or this one, with another network or price if given."""
    if given is None:
        given = Machine("this machine", "timed now", allowed_cores().usable, BETWEEN, INSIDE)
    machine = read_machine(given) if isinstance(given, str) else given
    machine = machine if network is None else replace(machine, between=network)
    if price_per_hour is not None and not price_per_hour > 0:
        raise BadOption(f"--price is {price_per_hour}; give the price of a host for an hour, such as 3.06")
    return machine if price_per_hour is None else replace(machine, price_per_hour=price_per_hour)


def read_machine(given: str) -> Machine:
    """Return an included machine, or the machine of a TOML file."""
    path = FOLDER / f"{given}.toml" if given in INCLUDED else Path(given)
    if path.suffix != ".toml":
        raise UnknownName("machine", given, INCLUDED, "Or give a file: --machine mine.toml.")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadOption(f"cannot read the machine's file {path}: {why}; name another") from error
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict) and key not in SECTIONS:
            raise UnknownName("section", key, SECTIONS, of=f"the machine's file {path}")
        values |= value if isinstance(value, dict) else {key: value}
    known = {f.name: f for f in fields(Machine)}
    for key in values:
        if key not in known:
            raise UnknownName("key", key, known, of=f"the machine's file {path}")
    missing = [key for key, f in known.items() if f.default is MISSING and key not in values]
    if missing:
        example = FOLDER / f"{INCLUDED[0]}.toml"
        raise BadOption(f"the machine's file {path} has no '{missing[0]}'; add it, as {example} has it")
    return Machine(**{key: _checked(path, known[key], value) for key, value in values.items()})


def _checked(path: Path, of: Field[Any], value: Any) -> Any:
    """Return the value of a key, or refuse it."""
    kind = str(of.type)
    listed = kind.startswith("tuple")
    if kind == "str":
        right, expected = isinstance(value, str), "a text"
    else:
        numbers = value if listed and isinstance(value, list) else [value]
        kinds = int if kind == "int" else int | float
        right = all(isinstance(one, kinds) and 0 < one < inf for one in numbers)
        expected = "a list of numbers above 0" if listed else "a number above 0"
    if of.name == "spread":
        right = right and len(numbers) > 1 and numbers == sorted(numbers)
        expected = "2 or more rising numbers"
    if not right:
        raise BadOption(f"'{of.name}' in the machine's file {path} is {value!r}; give {expected}")
    return tuple(numbers) if listed else value
