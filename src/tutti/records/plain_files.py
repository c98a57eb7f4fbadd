"""Files that are written only where they are plain ones. Needs neither torch nor MPI.

A run folder may come from somebody else: a link in it, in the place of a record, would have a run that goes
on write into any file of the user's.
"""

from __future__ import annotations

import errno
import os
import stat


def plain_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to write; also an opener for `open`.

    Args:
        path: of the file.
        flags: of `os.open`.

    Returns:
        Its descriptor; a new file has the permissions that the user's umask leaves.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
    return file
