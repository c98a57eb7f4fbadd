"""A real Slurm on two nodes of one machine: its daemons run in the namespaces of `Hosts` (needs root).

    namespace of a                                 namespace of b
    slurmctld, slurmd -N a, srun and sbatch ────── slurmd -N b          one munged for both, by a Unix socket

All files lie in a temporary folder, and whatever runs in the namespaces ends with them. Slurm comes from
Debian's packages (`make test-slurm` installs them). Jobs run as root; each node has all cores.

    with Slurm() as slurm:
        done = slurm.run(["srun", "--nodes", "2", "hostname"])
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.cluster import hosts as namespaces
from tests.cluster.hosts import Hosts

PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
"""The programs that this needs, and Debian's packages that have them."""

PATIENCE_S = 120.0
"""How long anything here may take on a machine that is busy."""

_PROBE_S = 0.1

_SETTINGS = """\
ClusterName=tutti
SlurmctldHost=a
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin={task_plugin}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=4
KillWait=2
SchedulerParameters=batch_sched_delay=1,sched_min_interval=0
{nodes}
PartitionName=all Nodes=a,b Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def why_not() -> str:
    """Why Slurm cannot be set up here; empty if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=path) is None]
    if missing:
        return f"Slurm is not installed; 'make test-slurm' installs Debian's packages {', '.join(missing)}"
    return namespaces.why_not()


class Slurm:
    """A cluster of the nodes a and b, for as long as the context lasts.

    Args:
        task_plugin: what binds tasks to their cores; "task/none": nothing does.

    Attributes:
        hosts: the namespaces of its nodes.
        folder: of its files, which every node sees.
    """

    def __init__(self, task_plugin: str = "task/affinity") -> None:
        self.hosts, self.folder, self._task_plugin = Hosts(("a", "b")), Path(), task_plugin
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        self.hosts.__enter__()
        # Slurm's jobs run in it, and other users than root may look at it.
        self.folder = Path(tempfile.mkdtemp(prefix="tutti-slurm-"))
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(
        self, command: Sequence[str], settings: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on node a, as a user of the cluster does."""
        return subprocess.run(
            self.hosts.on("a", command),
            env={**self.environment, **(settings or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user of the cluster."""
        scripts = Path(sys.executable).parent
        kept = ("PATH", "PYTHONPATH", "HOME", "LANG", "TUTTI_DATA", "PYTHONDONTWRITEBYTECODE")
        own = {name: os.environ[name] for name in kept if name in os.environ}
        # A command `tutti` in the cluster's folder comes before an installed one.
        path = f"{self.folder}:{scripts}:{own.get('PATH', '')}:/usr/sbin:/sbin"
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, *words: str, settings: Mapping[str, str] | None = None) -> int:
        """Submit a batch job; `words` are those of sbatch. Return its number."""
        done = self.run(["sbatch", "--parsable", *words], settings)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job, by Slurm's names, such as JobState."""
        said = self.run(["scontrol", "--oneliner", "show", "job", str(number)])
        assert said.returncode == 0, said.stderr
        return dict(re.findall(r"(\S+?)=(\S*)", said.stdout.splitlines()[0]))

    def wait_for(self, number: int, *states: str) -> dict[str, str]:
        """Wait until a job is in one of the states; by default until it has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        known: dict[str, str] = {}

        def reached() -> bool:
            known.update(self.job(number))
            return known["JobState"] in (states or ended)

        wait_until(reached, lambda: f"job {number} is {known.get('JobState')}: {self.logs()}")
        return known

    def tasks_on(self, node: str) -> list[str]:
        """The command lines of what runs on a node besides Slurm's daemons."""
        found = []
        for pid in self._processes(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except FileNotFoundError:
                continue
            line = b" ".join(words).decode().strip()
            if line and Path(line.split()[0]).name not in ("slurmctld", "slurmd"):
                found.append(line)
        return found

    def cut_off(self, node: str) -> None:
        """Cut a node off at once, as if its power were off: its processes end, and nobody is told."""
        self.hosts.cut_off(node)
        for pid in self._processes(node):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def join_again(self, node: str) -> None:
        """Start a node again that was cut off, and wait until jobs can run there."""
        self.hosts.join_again(node)
        # The PMIx plugin of this Slurm starts no step again on a node that has kept its sockets.
        for name in (f"tmp-{node}", f"spool-{node}"):
            shutil.rmtree(self.folder / name)
            (self.folder / name).mkdir()
        self._daemon(node, ["slurmd", "-D", "-N", node])
        self._wait_for_nodes(node)

    def logs(self) -> str:
        """The end of what the daemons have written."""
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted(self.folder.glob("*.log"))
        )

    def _start(self) -> None:
        for name in ("state", "spool-a", "spool-b", "tmp-a", "tmp-b"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        (self.folder / "slurm.conf").write_text(
            _SETTINGS.format(folder=self.folder, nodes=self._nodes(), task_plugin=self._task_plugin)
        )
        # It looks for control groups, which namespaces have not, unless it is told their version.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munge()
        self._daemon("a", ["slurmctld", "-D"])
        for node in self.hosts.names:
            self._daemon(node, ["slurmd", "-D", "-N", node])
        self._wait_for_nodes(*self.hosts.names)

    def _nodes(self) -> str:
        """The nodes' lines of the settings: each has what this machine has."""
        said = subprocess.run(
            ["slurmd", "-C"],
            env={**os.environ, "PATH": self.environment["PATH"]},
            capture_output=True,
            text=True,
        ).stdout
        machine = re.sub(r"^NodeName=\S+", "", said.splitlines()[0])
        return "\n".join(f"NodeName={node} {machine}" for node in self.hosts.names)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
        }
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        options += [f"--seed-file={self.folder / 'munge.seed'}"]
        self._begin(["munged", "--foreground", "--force", *options])
        wait_until((self.folder / "munge.socket").exists, self.logs)

    def _daemon(self, node: str, command: Sequence[str]) -> None:
        self._begin(self.hosts.on(node, command))

    def _begin(self, command: Sequence[str]) -> None:
        daemon = subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._daemons.append(daemon)

    def _wait_for_nodes(self, *nodes: str) -> None:
        def ready() -> bool:
            said = self.run(["sinfo", "--noheader", "--Node", "--format", "%N %t"])
            states = dict(line.split() for line in said.stdout.splitlines())
            return said.returncode == 0 and all(
                states.get(node) in ("idle", "mix", "alloc") for node in nodes
            )

        wait_until(ready, self.logs)

    def _processes(self, node: str) -> list[int]:
        space = self.hosts.namespace(node)
        said = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        return [int(pid) for pid in said.stdout.split()]

    def _end(self) -> None:
        self.hosts.__exit__(None, None, None)
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(
    reached: Callable[[], bool], said: Callable[[], str] = str, patience_s: float = PATIENCE_S
) -> None:
    """Look again and again whether something is so; fail with what `said` returns if it takes too long."""
    until = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < until, said()
        time.sleep(_PROBE_S)
