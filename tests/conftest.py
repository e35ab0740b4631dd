"""Order and marks that hold for every test: quick kinds first, and what a host cannot run is skipped by name."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# A broken rule is reported before the first process starts.
KINDS_IN_ORDER = ("unit", "sim", "integration", "e2e")


def _kind(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _rank(item: pytest.Item) -> int:
    kind = _kind(item)
    return KINDS_IN_ORDER.index(kind) if kind in KINDS_IN_ORDER else len(KINDS_IN_ORDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)
    needs_root = pytest.mark.skip(reason="needs root")
    for item in items:
        if _kind(item) == "e2e":
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("root") is not None and os.geteuid() != 0:
            item.add_marker(needs_root)
