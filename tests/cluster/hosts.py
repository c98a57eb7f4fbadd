"""Hosts made of network namespaces, so that a job across hosts can be tried on one machine (needs root).

    host a                               host b
    namespace tutti-PID-a                namespace tutti-PID-b
    10.77.0.1  ──────── veth pair ─────  10.77.0.2          each with a host name of its own (a UTS namespace)

mpirun runs on the first host and starts the other's daemon through a launch agent, where on a real cluster it
would use ssh. The hosts have the same processes and file systems; only their names and networks differ.

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
    """Two hosts, for as long as the context lasts.

    Args:
        names: their host names.
        rate: what the link between them carries each way, as `tc` writes it ("1gbit"); None: all it can.

    Attributes:
        mpirun_arguments: what mpirun needs to reach the hosts, to be given before the program.
        settings: the environment variables that it needs.
    """

    def __init__(self, names: Sequence[str] = ("a", "b"), rate: str | None = None) -> None:
        if len(names) != 2:
            raise ValueError(f"a veth pair joins 2 hosts, not {len(names)}: {list(names)}")
        self.names, self._rate = list(names), rate
        self._folder = Path()
        self._ends = {name: f"tu{os.getpid()}{number}" for number, name in enumerate(self.names)}
        self.mpirun_arguments: list[str] = []
        self.settings = {**SETTINGS, "OMPI_MCA_btl": "self,sm,tcp"}

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="tutti-hosts-"))
        agent = self._folder / "agent"
        agent.write_text(
            '#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "' + self.namespace("$host") + '" '
            "unshare -u sh -c \"hostname $host; exec sh -c '$*'\"\n"
        )
        agent.chmod(0o755)
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
        script = f"hostname {shlex.quote(host)} && exec {shlex.join(command)}"
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "-u", "sh", "-c", script]

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
        first, second = self._ends.values()
        _ip("link", "add", first, "type", "veth", "peer", "name", second)
        for name, end in self._ends.items():
            inside = ("-n", self.namespace(name))
            _ip("link", "set", end, "netns", self.namespace(name))
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
        for name in self.names:
            space = self.namespace(name)
            listed = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            )
            for pid in listed.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            # The veth pair goes with the namespaces that hold its ends.
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)
        shutil.rmtree(self._folder)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
