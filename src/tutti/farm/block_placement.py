"""The number of a host's blocks, and the cores and threads of their ranks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

from tutti.errors import BadOption
from tutti.farm.jobs import blocks_for
from tutti.launch.cores import Cores, allowed_cores
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement, refuse_too_many, share_host
from tutti.launch.rank_main import RankSetting
from tutti.records.texts import plural


def place_blocks(
    block: int,
    blocks: int | None,
    threads: int | None,
    jobs: int | None,
    servers: int = 0,
    cores: Cores | None = None,
) -> tuple[Placement, int]:
    """Decide the number of blocks, and the places of their ranks; the arguments are those of `work_on`.

    Return the placement of all ranks, block after block, and the number of blocks. It counts the workers and
    servers of all blocks. BadOption: this host has no room for such blocks.
    """
    cores = cores or allowed_cores()
    if started_by().launcher is not Launcher.ALONE:
        raise BadOption(
            f"a farm starts its ranks itself, but {started_by().launcher.value} has started this process; "
            "start it without, once on each host with --resume and the same --out folder"
        )
    given: dict[str, object] = {"--block": block, "--blocks": blocks, "--threads": threads}
    for name, value in given.items():
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise BadOption(f"{name} is {value}; give a whole number of at least 1")
    workers = block - servers
    if workers < 1:
        raise BadOption(all_serve(block, servers))
    if blocks is None:
        if workers > cores.usable:
            raise BadOption(
                f"--block is {block}, but this host has {cores.usable} cores that may be used; give at most "
                "as many, or --blocks 1 for ranks that take turns"
            )
        most = cores.usable // (workers * (threads or 1)) or 1
        blocks = most if jobs is None else blocks_for(jobs, most)
    refuse_too_many(blocks * block, cores)
    placement = share_host(cores, blocks * workers, threads)
    if placement.warnings:
        each = placement.threads or 1
        crowd = (
            f"blocks x ranks x threads = {blocks} x {workers} x {each} = {blocks * workers * each}, "
            f"more than the {cores.usable} cores that may be used: they take turns; "
            "give fewer --blocks or --threads"
        )
        placement = replace(placement, warnings=(crowd,))
    return replace(placement, servers=blocks * servers), blocks


def all_serve(block: int, servers: int) -> str:
    """Return the error message for a block with only servers."""
    why = f"--servers is {servers}, but the block has {plural(block, 'rank')}, which leaves none to train"
    return f"{why}; give a larger --block"


def settings_of(placement: Placement, blocks: int, allowed: Sequence[int]) -> list[list[RankSetting]]:
    """Return the threads and cores of each rank of each block; servers share those of its workers."""
    workers, servers = placement.workers // blocks, placement.servers // blocks
    cores = placement.cores or (tuple(allowed),) * placement.workers
    found = []
    for first in range(0, placement.workers, workers):
        own = cores[first : first + workers]
        shared = tuple(sorted({cpu for group in own for cpu in group}))
        found.append(
            [RankSetting(placement.threads or 1, one) for one in own] + [RankSetting(1, shared)] * servers
        )
    return found
