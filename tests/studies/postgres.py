"""A PostgreSQL server of one's own, for tests: without a port, gone with the context."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEBIAN = Path("/usr/lib/postgresql")


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server on a socket in a folder of its own, and yield the URL of its database."""
    programs = _programs()
    # It refuses to be run by root, and whoever runs it must reach its folder.
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.getuid())
    folder = Path(tempfile.mkdtemp(prefix="tutti-postgres-"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, user.pw_uid, user.pw_gid)
    # As another user, without the rights of this one's groups.
    who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        words = [
            "initdb",
            "-D",
            "data",
            "-A",
            "trust",
            "-U",
            "tester",
            "--no-sync",
            "--no-locale",
            "-E",
            "UTF8",
        ]
        _run(programs, words, folder, who)
        start = [
            "pg_ctl",
            "-D",
            "data",
            "-w",
            "-l",
            "log.txt",
            "-o",
            f"-F -k {folder} -c listen_addresses=''",
        ]
        _run(programs, [*start, "start"], folder, who)
        try:
            yield f"postgresql://tester:secret@/postgres?host={folder}"
        finally:
            _run(programs, ["pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop"], folder, who)
    finally:
        shutil.rmtree(folder)


def _programs() -> Path:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    newest = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not newest:
        pytest.skip("there is no PostgreSQL here: apt-get install postgresql")
    return newest[-1].parent


def _run(programs: Path, words: list[str], folder: Path, who: dict[str, object]) -> None:
    done = subprocess.run(
        [str(programs / words[0]), *words[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **who,
    )
    assert done.returncode == 0, done.stderr
