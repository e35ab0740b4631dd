"""The cache: an entry is whole or absent, through concurrent builders and killed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laminar.recipes.cache import default_cache, entry_name, obtain

# A builder that tells when it is in the middle, and goes on when its standard input closes.
HALF_WAY = """
import sys
from pathlib import Path
from laminar.recipes.cache import obtain

def build(folder):
    (folder / "first").write_text("half")
    print("half", flush=True)
    sys.stdin.read()
    (folder / "second").write_text("whole")

made = obtain(Path(sys.argv[1]), "entry", build, lambda line: print(line, flush=True))
print("cached" if made.cached else "built", flush=True)
"""


def start_builder(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(builder: subprocess.Popen[str]) -> str:
    assert builder.stdout is not None
    return builder.stdout.readline().strip()


def write_both(folder: Path) -> None:
    (folder / "first").write_text("half")
    (folder / "second").write_text("whole")


def refuse(folder: Path) -> None:
    raise AssertionError(f"{folder} must not be built again")


def ignore(line: str) -> None:
    del line


def visible(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.startswith(".")]


def test_an_entry_is_built_once_and_found_afterwards(tmp_path: Path) -> None:
    built = obtain(tmp_path, "entry", write_both, ignore)
    found = obtain(tmp_path, "entry", refuse, ignore)
    assert (built.cached, found.cached, found.path) == (False, True, built.path)


def test_a_builder_killed_in_the_middle_leaves_no_entry_and_the_next_one_starts_afresh(tmp_path: Path) -> None:
    builder = start_builder(tmp_path)
    with builder:
        assert said(builder) == "half"
        os.kill(builder.pid, signal.SIGKILL)
    assert visible(tmp_path) == []

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        write_both(folder)

    obtain(tmp_path, "entry", build, ignore)
    assert visible(tmp_path) == ["entry"] and list((tmp_path / ".building").iterdir()) == []


def test_of_two_builders_one_waits_and_finds_the_others_entry(tmp_path: Path) -> None:
    with start_builder(tmp_path) as first:
        assert said(first) == "half"
        with start_builder(tmp_path) as second:
            assert said(second) == "waiting for another process that builds entry"
            assert visible(tmp_path) == []
            first.communicate(timeout=20)
            assert said(second) == "cached"
    assert (tmp_path / "entry" / "second").read_text() == "whole"


def test_a_waiting_builder_takes_over_when_the_first_is_killed(tmp_path: Path) -> None:
    with start_builder(tmp_path) as first:
        assert said(first) == "half"
        with start_builder(tmp_path) as second:
            said(second)
            first.kill()
            assert said(second) == "half"
            out, _ = second.communicate(timeout=20)
    assert out.strip() == "built"
    assert visible(tmp_path) == ["entry"]


def test_many_threads_build_an_entry_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        write_both(folder)

    threads = [threading.Thread(target=obtain, args=(tmp_path, "entry", build, ignore)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(builds) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_both(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        obtain(tmp_path, "entry", build, ignore)
    assert visible(tmp_path) == [] and list((tmp_path / ".building").iterdir()) == []


def test_an_entry_is_named_by_its_name_version_and_parameters() -> None:
    base = entry_name("a", 1, {"seed": 0, "count": 5})
    assert base == entry_name("a", 1, {"count": 5, "seed": 0})
    others = {
        entry_name("b", 1, {"seed": 0, "count": 5}),
        entry_name("a", 2, {"seed": 0, "count": 5}),
        entry_name("a", 1, {"seed": 1, "count": 5}),
    }
    assert len(others | {base}) == 4


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
