"""The blocks of a study's farm. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.farm.block_placement import place_blocks
from tutti.farm.blocks import ENTRY
from tutti.launch.fork_server_client import prepare_ranks
from tutti.training.intervals import seconds_of


@dataclass(frozen=True)
class Blocks:
    """The ranks of a farm, and how long they may work; as in `tutti.farm.work.work_on`."""

    block: int = 1
    blocks: int | None = None
    threads: int | None = None
    job_timeout_s: float | None = None
    time_limit_s: float | None = None

    @classmethod
    def of(
        cls,
        block: int,
        blocks: int | None,
        threads: int | None,
        job_timeout: str | None,
        time_limit: str | None,
    ) -> Blocks:
        """Return the blocks of options, whose lengths of time are texts such as "10m".

        Raises:
            BadOption: one is no length of time.
        """
        limits = {"--job-timeout": job_timeout, "--time-limit": time_limit}
        seconds = (None if text is None else seconds_of(text, name) for name, text in limits.items())
        return cls(block, blocks, threads, *seconds)

    def prepare(self, jobs: int | None, servers: int = 0) -> None:
        """Start what the ranks will come from: it imports torch while this process does other things.

        Args:
            jobs: as in `tutti.farm.work.work_on`.
            servers: likewise.

        Raises:
            BadOption: this host has no room for such blocks.
        """
        place_blocks(self.block, self.blocks, self.threads, jobs, servers)
        prepare_ranks(ENTRY)
