"""Memory of a container's processes, by its control group, of version 1 or 2."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def memory_group(pid: int) -> Path:
    """Return the folder of a process's control group for memory."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return CGROUPS / "memory" / path.removeprefix("/")
        if controllers == "" and (CGROUPS / "cgroup.controllers").exists():
            return CGROUPS / path.removeprefix("/")
    raise AssertionError(f"process {pid} has no control group for memory")


def resident_bytes(group: Path) -> int:
    """Return the bytes that no page of a file on a disk could give back."""
    found = _numbers(group / "memory.stat")
    return found.get("total_rss", found.get("anon", 0)) + found.get("total_shmem", found["shmem"])


def num_killed(group: Path) -> int:
    """Return how many of its processes the kernel has killed because they wanted more."""
    events = group / "memory.events"
    return _numbers(events if events.exists() else group / "memory.oom_control")["oom_kill"]


def _numbers(file: Path) -> dict[str, int]:
    words = [line.split() for line in file.read_text().splitlines()]
    return {name: int(number) for name, number in words}
