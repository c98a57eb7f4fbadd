"""Has a program run by the server of this folder: stub.py SOCKET [--keep=DESCRIPTOR,...] PROGRAM ARGUMENTS...

The program has the standard streams of this process, and the descriptors to be kept, by the same numbers.
It is started with no packages on its path, and imports what it cannot do without.
"""

import contextlib
import json
import os
import signal
import socket
import sys

KEEP = "--keep="
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main() -> None:
    address, *arguments = sys.argv[1:]
    kept = []
    if arguments[0].startswith(KEEP):
        kept = [int(number) for number in arguments.pop(0)[len(KEEP) :].split(",")]
    job = json.dumps(
        {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "kept": kept}
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(job).to_bytes(4)], [0, 1, 2, *kept])
        server.sendall(job)
        # Who waits for the end of one waits for the program, not for this process.
        for descriptor in kept:
            os.close(descriptor)
        process = int.from_bytes(server.recv(4))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: pass_on(number, process))
        # The server tells how the program has ended, as `os.waitpid` does.
        status = server.recv(4)
    if not status:
        sys.exit("the server that had forked this program is gone")
    end_as(int.from_bytes(status))


def pass_on(number: int, process: int) -> None:
    """Send a signal to the program, unless it has just ended: how, the server is about to tell."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def end_as(status: int) -> None:
    """End this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


main()
