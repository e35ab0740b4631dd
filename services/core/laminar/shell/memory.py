"""How much memory processes of this container can still take."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """MemAvailable (what the kernel can give without swapping), or what this container's limit leaves, if that is less.

    Raises OSError where there is no such number (Linux is needed).
    """
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    if "MemAvailable" not in fields:
        raise OSError(f"{meminfo} has no MemAvailable")
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available_bytes = min(available_bytes, max(0, int(text) - int(used.read_text())))
    return available_bytes
