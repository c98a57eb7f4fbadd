"""Has a program run by the server of this folder: stub.py SOCKET PROGRAM ARGUMENTS...

It is started with no packages on its path, and imports what it cannot do without.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main() -> None:
    address, *arguments = sys.argv[1:]
    job = json.dumps(
        {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(job).to_bytes(4)], [0, 1, 2])
        server.sendall(job)
        process = int.from_bytes(server.recv(4))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(process, number))
        # The server tells how the program has ended, as `os.waitpid` does.
        status = server.recv(4)
    if not status:
        sys.exit("the server that had forked this program is gone")
    end_as(int.from_bytes(status))


def end_as(status: int) -> None:
    """End this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


main()
