"""How much memory this process can still get: from the host, and from every control group that it is in."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The least of what the kernel can allocate without swapping and what each limit around us leaves."""
    return min([_host_bytes(proc), *_cgroup_bytes(proc, cgroup)])


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Where the host lets shared memory have huge pages on request (shmem_enabled=advise), this mapping does: filling a
    page table with 4 KiB entries costs half as much as copying what they point to."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel without huge pages.


def _host_bytes(proc: Path) -> int:
    meminfo = proc / "meminfo"
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable")


def _cgroup_bytes(proc: Path, root: Path) -> Iterator[int]:
    """What is left below each limit, of cgroup v2 or v1, from our own group up to the one that is mounted."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root / "memory", path, *names)


def _left(root: Path, path: str, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    # In a container the path is often that of the host, while only our own group is mounted: then the root is it.
    group = root / path.lstrip("/")
    if not group.is_dir():
        group = root
    while True:
        limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            # The page cache gives way; memory of memfds does not.
            yield max(0, int(limit) - max(0, int(usage) - _stat(group / "memory.stat", reclaimable_name)))
        if group == root:
            return
        group = group.parent


def _stat(path: Path, wanted: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0


def _text(path: Path) -> str:
    """Empty if there is no such file: not every group has every limit."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
