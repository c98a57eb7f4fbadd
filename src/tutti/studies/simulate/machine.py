"""A kind of host and the network between such hosts, from a TOML file. Needs no torch."""

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
"""The sections of a machine's file; which one a key is in makes no difference."""

BETWEEN: Final = "10gbit,50us"
INSIDE: Final = "64gbit,1us"
"""Links of a machine that is not described."""


@dataclass(frozen=True)
class Machine:
    """A kind of host; the fields are the keys of its file.

    Raises:
        BadOption: the words name no network that can be.
    """

    name: str
    source: str  # of the figures, with the year
    ranks_per_host: int
    between: str  # the network between hosts, as `Network.parse` reads it
    inside: str  # the link between two ranks of a host, likewise
    price_per_hour: float | None = None  # of a host; None: unknown
    speeds: tuple[float, ...] = (1.0,)  # relative, of the hosts in turn
    flops_per_s: float | None = None  # of a rank; None: the model is timed on this machine
    spread: tuple[float, ...] = (1.0, 1.0)  # equally spaced quantiles of a step's time, over the median
    hours_between: float = inf  # from one failure of a host to the next
    repair_s: float = 600.0  # until a failed host is back
    checkpoint_every_s: float = 600.0
    restart_s: float = 60.0  # from a failure until ranks train again, where hosts are there
    samples_per_s: float = inf  # that the input of a rank can read

    def __post_init__(self) -> None:
        _ = self.network

    @property
    def network(self) -> Network:
        """The links of a cluster of such hosts."""
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
        """Return the workers of each host; hosts are filled in turn."""
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
    """Return a machine, of a name, a TOML file, or by default this one; with another network or price.

    Raises:
        UserError: the machine cannot be read, or has a value that cannot be.
    """
    if given is None:
        given = Machine("this machine", "timed now", allowed_cores().usable, BETWEEN, INSIDE)
    machine = read_machine(given) if isinstance(given, str) else given
    machine = machine if network is None else replace(machine, between=network)
    if price_per_hour is not None and not price_per_hour > 0:
        raise BadOption(f"--price is {price_per_hour}; give what a host costs for an hour, such as 3.06")
    return machine if price_per_hour is None else replace(machine, price_per_hour=price_per_hour)


def read_machine(given: str) -> Machine:
    """Return one of the machines that are included, or that of a TOML file."""
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
    """Return the value of a key, or refuse one that cannot be."""
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
        right, expected = (
            right and len(numbers) > 1 and numbers == sorted(numbers),
            "2 or more rising numbers",
        )
    if not right:
        raise BadOption(f"'{of.name}' in the machine's file {path} is {value!r}; give {expected}")
    return tuple(numbers) if listed else value
