"""How much memory is free: by the kernel, and by the limit of the container."""

from pathlib import Path

import pytest

from laminar.shell.memory import available_memory_bytes


def machine(folder: Path, *, available_kib: int, limit: str | None = None, used_bytes: int = 0) -> dict[str, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:  99 kB\nMemAvailable:   {available_kib} kB\nSwapFree: 0 kB\n")
    if limit is not None:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used_bytes}\n")
    return {"meminfo": meminfo, "cgroup": folder}


def test_without_a_limit_it_is_what_the_kernel_can_give(tmp_path: Path) -> None:
    assert available_memory_bytes(**machine(tmp_path, available_kib=7)) == 7 * 1024
    assert available_memory_bytes(**machine(tmp_path, available_kib=7, limit="max")) == 7 * 1024


def test_a_tighter_limit_of_the_container_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(**machine(tmp_path, available_kib=1000, limit="5000", used_bytes=2000)) == 3000


def test_a_limit_that_is_overrun_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory_bytes(**machine(tmp_path, available_kib=1000, limit="5000", used_bytes=6000)) == 0


def test_a_system_without_the_number_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="meminfo has no MemAvailable"):
        available_memory_bytes(tmp_path / "meminfo", tmp_path)
