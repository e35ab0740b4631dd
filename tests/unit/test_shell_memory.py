"""How much memory is free: the host's, within every limit of its control groups."""

from pathlib import Path

import pytest

from laminar.shell.memory import available_memory_bytes

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/kube/pod/main\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(group: Path, maximum: str, current: int, inactive_file: int = 0) -> None:
    write(group / "memory.max", f"{maximum}\n")
    write(group / "memory.current", f"{current}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {inactive_file}\n")


def available(host: Path) -> int:
    return available_memory_bytes(host / "proc", host / "cgroup")


def test_without_limits_it_is_what_the_host_has(host: Path) -> None:
    limit(host / "cgroup/kube/pod/main", "max", GIB)
    assert available(host) == 8 * GIB


def test_the_tightest_group_around_it_counts_and_its_page_cache_does_not(host: Path) -> None:
    limit(host / "cgroup/kube/pod/main", str(6 * GIB), GIB)
    limit(host / "cgroup/kube/pod", str(4 * GIB), 3 * GIB, inactive_file=GIB)
    assert available(host) == 2 * GIB


def test_a_container_that_sees_only_its_own_group_finds_its_limit_at_the_root(host: Path) -> None:
    limit(host / "cgroup", str(3 * GIB), GIB)
    assert available(host) == 2 * GIB


def test_the_first_version_of_control_groups_counts_as_well(host: Path) -> None:
    write(host / "proc/self/cgroup", "5:cpu:/x\n4:memory:/pod\n")
    write(host / "cgroup/memory/pod/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(host / "cgroup/memory/pod/memory.usage_in_bytes", f"{GIB}\n")
    assert available(host) == GIB


def test_a_group_that_is_full_leaves_nothing(host: Path) -> None:
    limit(host / "cgroup/kube/pod/main", str(GIB), 2 * GIB)
    assert available(host) == 0


def test_this_host_has_some() -> None:
    assert available_memory_bytes() > 0


def test_a_kernel_that_does_not_say_is_an_error(host: Path) -> None:
    write(host / "proc/meminfo", "MemTotal: 99 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available(host)
