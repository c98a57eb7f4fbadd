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

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.mpi.mpirun import MPIRUN, SETTINGS, run

NETWORK = "10.77.0.0/24"
ETC = Path("/etc/netns")
TEMPORARY = "/mnt"
"""The folder for temporary files of a host that is apart: a file system in memory, as its /dev/shm is."""

_INIT = f"""\
#!/bin/sh
hostname "$1" && mount -t proc proc /proc || exit 99
for place in /dev/shm {TEMPORARY}; do mount -t tmpfs -o mode=1777 tmpfs $place || exit 99; done
touch "$2"
# Processes without a parent become children of this one, and leave no zombies as it does not ask for them.
ignore='signal.signal(signal.SIGCHLD, signal.SIG_IGN)'
exec {sys.executable} -ISc "import signal; $ignore; [signal.pause() for _ in iter(int, 1)]"
"""
"""The first process of a host that is apart."""

_START_S = 10.0

_AGENT = """\
#!{python} -IS
import array, json, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({server!r})
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([json.dumps(sys.argv[1:]).encode()], files)
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(10) or b"255"))
"""
"""The launch agent: it has a program started from outside, as no host may look into another one."""


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
        apart: what is started on one sees no processes of the others, nor their shared memory and temporary
            files. As on a machine, a process may outlive all others.

    Attributes:
        mpirun_arguments: what mpirun needs to reach the hosts, to be given before the program.
        settings: the environment variables that it needs.
    """

    def __init__(
        self, names: Sequence[str] = ("a", "b"), rate: str | None = None, *, apart: bool = False
    ) -> None:
        self.names, self._rate = list(names), rate
        self._apart, self._inits = apart, dict[str, subprocess.Popen[bytes]]()
        self._off = set[str]()
        self._server = socket.socket(socket.AF_UNIX)
        self._folder, self._switch = Path(), "-".join(["switch", *self.names])
        self._ends = {name: f"tu{os.getpid()}{number}" for number, name in enumerate(self.names)}
        self.mpirun_arguments: list[str] = []
        self.settings = {**SETTINGS, "OMPI_MCA_btl": "self,sm,tcp"}

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="tutti-hosts-"))
        entrance, init = self._folder / "entrance", self._folder / "init"
        entrance.write_text('#!/bin/sh\nhostname "$1" || exit 99\nshift\nexec "$@"\n')
        init.write_text(_INIT)
        agent, server = self._folder / "agent", self._folder / "server"
        agent.write_text(_AGENT.format(python=sys.executable, server=str(server)))
        self.mpirun_arguments = [
            "--allow-run-as-root",
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--prtemca", "prte_if_include", NETWORK),
            *("--mca", "btl_tcp_if_include", NETWORK),
        ]
        for program in (entrance, init, agent):
            program.chmod(0o755)
        try:
            self._build()
            self._server.bind(str(server))
            self._server.listen()
            threading.Thread(target=self._serve, name="hosts-server", daemon=True).start()
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
        if self._apart:
            inside = ["nsenter", "--target", str(self._first(host)), "--net", "--uts", "--pid", "--mount"]
            return [*inside, "env", f"TMPDIR={TEMPORARY}"]
        where = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts"]
        return [*where, str(self._folder / "entrance"), host]

    def _serve(self) -> None:
        """Start what the agents ask for, until the socket is closed."""
        while True:
            try:
                agent, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._start_for, args=(agent,), name="hosts-agent", daemon=True).start()

    def _start_for(self, agent: socket.socket) -> None:
        """Start a program on a host, and tell an agent, which may be killed, how it ended."""
        with agent, suppress(OSError):
            said, files, _, _ = socket.recv_fds(agent, 1 << 18, 3)
            host, *words = json.loads(said)
            code = 255
            # No host is reached that is not there, or is off the network.
            if not self._apart or (self.is_up(host) and host not in self._off):
                code = subprocess.call(self.on(host, ["sh", "-c", " ".join(words)]), **_streams(files))
            for file in files:
                os.close(file)
            agent.send(str(code & 255).encode())

    def _first(self, host: str) -> int:
        """The number of a host's first process."""
        parent = self._inits[host].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text())

    def file(self, host: str, name: str) -> Path:
        """A file of a host that is apart, as this machine sees it."""
        return Path(f"/proc/{self._first(host)}/root", name.lstrip("/"))

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
        self._off.add(host)
        _ip("-n", self.namespace(host), "link", "set", self._ends[host], "down")

    def join_again(self, host: str) -> None:
        """Put a host back onto the network."""
        _ip("-n", self.namespace(host), "link", "set", self._ends[host], "up")
        self._off.remove(host)

    def kill(self, host: str) -> None:
        """Take a host off the network, and end all that runs on it, as when its power fails."""
        self.cut_off(host)
        self._end(self.namespace(host))
        if host in self._inits:
            self._inits[host].wait()

    def slow_down(self, host: str, rate: str) -> None:
        """Let a host's link carry no more than a rate each way, as `tc` writes it ("1gbit")."""
        for space, end in ((host, self._ends[host]), (self._switch, f"{self._ends[host]}p")):
            self._limit(space, end, rate)

    def lose_packets(self, sender: str, receiver: str) -> None:
        """Have nothing come any more of what one host sends to another, which is not told."""
        address, end = f"10.77.0.{self.names.index(receiver) + 1}", self._ends[sender]
        nobody = ["lladdr", "02:00:00:00:00:01", "dev", end, "nud", "permanent"]
        _ip("-n", self.namespace(sender), "neigh", "replace", address, *nobody)

    def processes(self, host: str) -> list[int]:
        """The processes that were started on a host, by their numbers on this machine."""
        command = ["ip", "netns", "pids", self.namespace(host)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        if not self.is_up(host):
            return list(map(int, found))
        # What brings a process to a host that is apart is outside of it, as ssh would be.
        first = self._first(host)
        inside = self._space_of(first)
        return [one for one in map(int, found) if one != first and self._space_of(one) == inside]

    def _space_of(self, process: int) -> str:
        """The process namespace of a process; nothing if it has ended."""
        try:
            return os.readlink(f"/proc/{process}/ns/pid")
        except OSError:
            return ""

    def namespace(self, host: str) -> str:
        """The name of a host's network namespace."""
        return f"tutti-{os.getpid()}-{host}"

    def _limit(self, name: str, end: str, rate: str) -> None:
        # A larger burst would carry the start of every message faster than this. The queue drops nothing.
        limit = ["tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
        command = ["tc", "-n", self.namespace(name), "qdisc", "replace", "dev", end, "root", *limit]
        subprocess.run(command, check=True, capture_output=True)

    def is_up(self, host: str) -> bool:
        """Tell whether a host that is apart runs."""
        return host in self._inits and self._inits[host].poll() is None

    def _start(self, host: str) -> None:
        """Start the first process of a host that is apart."""
        ready = self._folder / f"{host}-is-up"
        inside = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "--pid", "--mount"]
        command = [*inside, "--fork", "--kill-child", str(self._folder / "init"), host, str(ready)]
        self._inits[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not ready.exists():
            if self._inits[host].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"host {host} has not started")
            time.sleep(0.01)

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
                self.slow_down(name, self._rate)
            if self._apart:
                self._start(name)

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            space = self.namespace(name)
            self._end(space)
            # The veth pairs go with the namespaces that hold their ends.
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)
        for init in self._inits.values():
            init.kill()
            init.wait()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        shutil.rmtree(self._folder)

    def _end(self, space: str) -> None:
        listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _streams(files: Sequence[int]) -> dict[str, int]:
    return dict(zip(("stdin", "stdout", "stderr"), files, strict=True))


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
