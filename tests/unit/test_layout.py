"""Rules about files that no other tool keeps: a break of one shows up far from its cause."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"
CORE_PACKAGES = ("core", "wire", "shell", "cli", "recipes")
SERVICE_PACKAGES = ("trainer", "rollout", "relay", "pool")
LEAF_PACKAGES = [SERVICES / "core" / "laminar" / name for name in CORE_PACKAGES] + [
    SERVICES / name / "laminar" / name for name in SERVICE_PACKAGES
]
# About 400 is the aim; past this a file holds two subjects.
MAX_FILE_LINES = 500
# Importing torch takes more than a second and hundreds of MB in each process that does.
ENTRY_POINTS_WITHOUT_TORCH = [
    "laminar.cli.__main__",
    "laminar.pool.__main__",
    "laminar.relay.__main__",
    "laminar.rollout.__main__",
    "laminar.trainer.__main__",
]


def _product_files() -> Iterator[Path]:
    for root in (SERVICES, ROOT / "operator"):
        yield from sorted(root.rglob("*.py"))


def _relative(paths: Iterable[Path]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def _run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python from the root of the repository, which is then first on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_no_init_file_turns_a_shared_folder_into_a_package() -> None:
    namespaces = [path for path in SERVICES.rglob("laminar") if path.is_dir()]
    assert namespaces
    forbidden = [ROOT / "operator", ROOT / "operator" / "laminar", ROOT / "laminar", *namespaces]
    inits = [folder / "__init__.py" for folder in forbidden if (folder / "__init__.py").exists()]
    inits += (ROOT / "tests").rglob("__init__.py")
    assert _relative(inits) == []


@pytest.mark.parametrize("package", LEAF_PACKAGES, ids=lambda package: package.name)
def test_each_package_says_what_it_is_and_is_typed(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert (package / "py.typed").exists()


def test_every_package_in_a_laminar_folder_has_its_init_file() -> None:
    packages = [path for path in SERVICES.glob("*/laminar/*") if path.is_dir() and path.name != "__pycache__"]
    assert _relative(path for path in packages if not (path / "__init__.py").exists()) == []


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert _relative(path for path in _product_files() if {path.stem, path.parent.name} & vague) == []


def test_no_product_file_is_too_long() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in _product_files()}
    assert _relative(path for path, count in lines.items() if count > MAX_FILE_LINES) == []


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_core_imports_nothing_but_the_standard_library_and_itself() -> None:
    allowed = sys.stdlib_module_names | {"laminar"}
    foreign: list[str] = []
    for path in sorted((SERVICES / "core" / "laminar" / "core").rglob("*.py")):
        for name in _imported_modules(ast.parse(path.read_text())):
            own = name == "laminar.core" or name.startswith("laminar.core.")
            if name.partition(".")[0] not in allowed or (name.startswith("laminar") and not own):
                foreign.append(f"{path.name}: {name}")
    assert foreign == []


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            if node.module == "laminar":
                yield from (f"laminar.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_the_standard_operator_module_is_found_from_the_root() -> None:
    statement = "import operator, sysconfig; assert operator.__file__.startswith(sysconfig.get_path('stdlib'))"
    finished = _run_python("-m", "timeit", "-n", "1", "-r", "1", statement)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("module", ENTRY_POINTS_WITHOUT_TORCH)
def test_a_process_that_must_answer_at_once_does_not_import_torch(module: str) -> None:
    package = module.split(".")[1]
    folder = SERVICES / (package if package in SERVICE_PACKAGES else "core") / "laminar" / package
    if not (folder / "__main__.py").exists():
        pytest.skip(f"{module} does not exist yet")
    program = f"import json, sys, {module}; print(json.dumps(sorted({{'torch', 'transformers'}} & sys.modules.keys())))"
    finished = _run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == []


def test_every_pin_satisfies_what_the_distribution_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for extra, requirements in project["project"]["optional-dependencies"].items():
        # This extra is for one example only and is installed by hand.
        asked += [] if extra == "smollm2" else requirements
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    unmet: list[str] = []
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name != project["project"]["name"] and not requirement.specifier.contains(pins.get(name, "0")):
            unmet.append(str(requirement))
    assert unmet == []
