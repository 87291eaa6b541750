"""How many files this process may have open: every connection is one. Knows no connection."""

from __future__ import annotations

import resource

# Files that a process needs beside its connections.
SPARE_FILES = 64


def allow_open_files(num_connections: int) -> None:
    """Raise this process's limit of open files as far as it may for so many connections.

    A run that would need more still starts: only as many as overlap need a file, and a
    request that finds none is recorded as the client's failure.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
