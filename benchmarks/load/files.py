"""The limit of open files of this process: every connection is one. Knows no connection."""

from __future__ import annotations

import resource

# Files that a process needs besides its connections.
SPARE_FILES = 64


def allow_open_files(num_connections: int) -> None:
    """Raise this process's limit of open files as far as allowed for `num_connections`.

    A run that may need more still starts: only overlapping connections need a file each, and a
    request that gets none is recorded as the client's failure.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
