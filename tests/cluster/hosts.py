"""Hosts made of network namespaces, so that a job across hosts can be tried on one machine (needs root).

    host a                               host b
    namespace tutti-PID-a                namespace tutti-PID-b
    10.77.0.1  ─ veth ─ switch ─ veth ─  10.77.0.2          each with a host name of its own (a UTS namespace)

mpirun runs on the first host and starts the other's daemon through a launch agent, where on a real cluster it
would use ssh. Only the names and networks of the hosts differ; if they are `apart`, each sees nothing but its
own processes and shared memory.

    with Hosts(["a", "b"]) as hosts:
        done = hosts.mpirun({"a": 2, "b": 3}, [sys.executable, "program.py"])
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.mpi.mpirun import MPIRUN, SETTINGS, run

NETWORK = "10.77.0.0/24"
ETC = Path("/etc/netns")
_MOUNTS = "&& mount -t proc proc /proc && mount -t tmpfs -o mode=1777 shm /dev/shm && export TMPDIR=/dev/shm"


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "making hosts from network namespaces needs root"
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"making hosts from network namespaces needs {', '.join(missing)}"
    name = f"tutti-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        tried = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "-u", "hostname", "try"],
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Some hosts, for as long as the context lasts.

    Args:
        names: their host names.
        rate: what the link of each carries each way, as `tc` writes it ("1gbit"); None: all it can.
        apart: what is started on one sees no processes of the others, nor their shared memory.

    Attributes:
        mpirun_arguments: what mpirun needs to reach the hosts, to be given before the program.
        settings: the environment variables that it needs.
    """

    def __init__(
        self, names: Sequence[str] = ("a", "b"), rate: str | None = None, *, apart: bool = False
    ) -> None:
        self.names, self._rate = list(names), rate
        self._unshare = ["unshare", "--uts", *(["--pid", "--mount", "--kill-child"] if apart else [])]
        self._mounts = _MOUNTS if apart else ""
        self._folder, self._switch = Path(), "-".join(["switch", *self.names])
        self._ends = {name: f"tu{os.getpid()}{number}" for number, name in enumerate(self.names)}
        self.mpirun_arguments: list[str] = []
        self.settings = {**SETTINGS, "OMPI_MCA_btl": "self,sm,tcp"}

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="tutti-hosts-"))
        entrance = self._folder / "entrance"
        # As the first process of a host it takes signals, and its dead.
        entrance.write_text(f'#!/bin/sh\nhostname "$1" {self._mounts} || exit 99\nshift\n"$@"\nexit $?\n')
        agent = self._folder / "agent"
        inside = shlex.join(self._inside("HOST")).replace("HOST", '"$host"')
        agent.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {inside} sh -c "$*"\n')
        for program in (entrance, agent):
            program.chmod(0o755)
        self.mpirun_arguments = [
            "--allow-run-as-root",
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--prtemca", "prte_if_include", NETWORK),
            *("--mca", "btl_tcp_if_include", NETWORK),
        ]
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return [*self._inside(host), *command]

    def _inside(self, host: str) -> list[str]:
        where = ["ip", "netns", "exec", self.namespace(host), *self._unshare]
        return [*where, str(self._folder / "entrance"), host]

    def mpirun(
        self,
        ranks: Mapping[str, int],
        program: Sequence[str],
        options: Sequence[str] = (),
        timeout_s: float = 200.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program under mpirun, on so many ranks of each host; mpirun itself runs on the first host."""
        placed = ",".join(f"{host}:{count}" for host, count in ranks.items())
        total = str(sum(ranks.values()))
        # By default two ranks are mapped by core, and then both land on the first host.
        where = ["--map-by", "slot:oversubscribe", "--host", placed, "-n", total]
        return self.run([str(MPIRUN), *self.mpirun_arguments, *options, *where, *program], timeout_s)

    def run(self, command: Sequence[str], timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host."""
        return run(self.on(self.names[0], command), self.settings, timeout_s)

    def cut_off(self, host: str) -> None:
        """Take a host off the network: what is sent to it is lost."""
        _ip("-n", self.namespace(host), "link", "set", self._ends[host], "down")

    def join_again(self, host: str) -> None:
        """Put a host back onto the network."""
        _ip("-n", self.namespace(host), "link", "set", self._ends[host], "up")

    def kill(self, host: str) -> None:
        """Take a host off the network, and end all that runs on it, as when its power fails."""
        self.cut_off(host)
        self._end(self.namespace(host))

    def processes(self, host: str) -> list[int]:
        """The processes of a host, by their numbers on this machine."""
        command = ["ip", "netns", "pids", self.namespace(host)]
        return list(
            map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        )

    def namespace(self, host: str) -> str:
        """The name of a host's network namespace."""
        return f"tutti-{os.getpid()}-{host}"

    def _build(self) -> None:
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.names, start=1)}
        known = "".join(f"{address} {name}\n" for name, address in addresses.items())
        for name in self.names:
            _ip("netns", "add", self.namespace(name))
            # `ip netns exec` shows this file as /etc/hosts inside.
            folder = ETC / self.namespace(name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        switch = ("-n", self.namespace(self._switch))
        _ip("netns", "add", self.namespace(self._switch))
        _ip(*switch, "link", "add", "ports", "type", "bridge")
        _ip(*switch, "link", "set", "ports", "up")
        for name, end in self._ends.items():
            inside = ("-n", self.namespace(name))
            port = ("dev", f"{end}p")
            _ip("link", "add", end, "netns", self.namespace(name), "type", "veth", "peer", "name", port[1])
            _ip("link", "set", port[1], "netns", self.namespace(self._switch))
            _ip(*switch, "link", "set", *port, "master", "ports")
            _ip(*switch, "link", "set", *port, "up")
            _ip(*inside, "addr", "add", f"{addresses[name]}/24", "dev", end)
            _ip(*inside, "link", "set", end, "up")
            _ip(*inside, "link", "set", "lo", "up")
            if self._rate is not None:
                limit = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run(
                    ["tc", *inside, "qdisc", "add", "dev", end, "root", *limit],
                    check=True,
                    capture_output=True,
                )

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            space = self.namespace(name)
            self._end(space)
            # The veth pairs go with the namespaces that hold their ends.
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)
        shutil.rmtree(self._folder)

    def _end(self, space: str) -> None:
        listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
