"""The options of all farms: the blocks of ranks, the folder, and where the runs are made."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tutti.cli.options import Parser, Words
from tutti.errors import BadOption, UserError
from tutti.farm.slurm import SCRIPT, ArrayJob
from tutti.studies.farms import Blocks

HERE: Final = "here"
SLURM: Final = "slurm"

_RANKS: Final = re.compile(r"(?<![\w-])-n (?=\d)")


def define_farm(parser: Parser, folder: str) -> None:
    """Add the options of all farms to a command's parser."""
    parser.option("--block", "ranks of each run", "B", 1, type=int)
    blocks = "runs at a time (default: by the number of cores and of runs)"
    parser.option("--blocks", blocks, "N", type=int)
    parser.option("--threads", "threads of each rank (default: the cores / the ranks)", "N", type=int)
    timeout = "end a run that is not done after this time, such as 10m"
    parser.option("--job-timeout", timeout, "DURATION")
    limit = "save and stop after this time, such as 2h; --resume continues"
    parser.option("--time-limit", limit, "DURATION")
    parser.option("--out", f"folder of all runs and results (default: {folder})", "FOLDER")
    parser.option("--resume", "continue in --out, alone or with other hosts; finished runs are kept")
    on = "where to make the runs: on this host, or in a job array of Slurm with --blocks tasks"
    parser.option("--on", on, default=HERE, choices=[HERE, SLURM])
    # `array_job` refuses it.
    parser.option("--hosts", argparse.SUPPRESS, "HOSTS")


@contextmanager
def ranks_by_block() -> Iterator[None]:
    """Write --block instead of -n in a `UserError`."""
    try:
        yield
    except UserError as error:
        error.args = tuple(_RANKS.sub("--block ", one) if isinstance(one, str) else one for one in error.args)
        raise


def array_job(words: Words, servers: int) -> ArrayJob | None:
    """Return the job array that will work on the farm; None: this process works on it."""
    own = words.own
    if own.resume and own.out is None:
        raise BadOption("--resume needs --out: the folder to continue")
    if own.hosts is not None:
        raise BadOption(
            "--hosts is an option of 'tutti train'; start this command on each host with --resume and the "
            "same --out folder, on a file system that all hosts share, or as a job array with --on slurm"
        )
    if own.on == HERE:
        return None
    if own.blocks is None or own.blocks < 1:
        raise BadOption("--on slurm needs --blocks N: the job array has N tasks, each with one run at a time")
    line = [word for word in words.line if word != "--dry-run"]
    return ArrayJob(line, own.blocks, max(1, own.block - servers), own.threads or 1)


def blocks_of(words: Words, array: ArrayJob | None) -> Blocks:
    """Return the blocks of ranks of this host, and start their fork server."""
    own = words.own
    count = own.blocks if array is None else None
    blocks = Blocks.of(own.block, count, own.threads, own.job_timeout, own.time_limit)
    blocks.prepare()
    return blocks


def print_script(job: ArrayJob | None, out: str | None) -> None:
    """Print the script of a job array, if there is one."""
    if job is not None:
        folder = Path(out or "FARM")
        print(f"{folder / SCRIPT}:\n\n{job.script(folder)}", end="")


def submit(job: ArrayJob, folder: Path) -> None:
    """Submit a farm to Slurm, and print what to do next."""
    number, path = job.submit(folder), shlex.quote(str(folder))
    print(
        f"submitted {folder / SCRIPT} as job {number}, an array of {job.tasks} tasks\n"
        f"progress: tutti watch {path}; results: tutti report {path}"
    )
