"""The documentation of metrics and commands names what there is."""

import re
import subprocess
import sys
from pathlib import Path

import typer
from typer.main import get_command

from laminar.cli import commands

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    quoted = re.compile(r'"(laminar_[a-z_]+)"')
    sources = [*SERVICES.rglob("metrics.py"), *SERVICES.glob("pool/laminar/pool/*.py"), *SERVICES.rglob("service.py")]
    made = {name for source in sources for name in quoted.findall(source.read_text())}
    assert len(made) > 20
    documented = set(re.findall(r"`(laminar_[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert made - documented == set()
    assert documented - made == set()


def test_every_trainer_statistic_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    learner = (SERVICES / "trainer" / "laminar" / "trainer" / "learner.py").read_text()
    block = learner.partition("stats = {")[2].partition("}")[0]
    names = set(re.findall(r'"([a-z_]+)":', block)) - {"reward_mean", "tokens"}
    assert names and {name for name in names if f"`{name}`" not in text} == set()


def test_naming_the_commands_imports_nothing_that_only_one_of_them_needs() -> None:
    show = "import sys, laminar.cli.commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"aiohttp", "pydantic", "sqlite3", "yaml", "tokenizers", "tensorboard", "torch", "rich.live"}
    assert heavy.intersection(done.stdout.split()) == set()


def test_the_quickstart_names_only_commands_that_exist() -> None:
    app = typer.Typer()
    commands.register(app)
    known = {*getattr(get_command(app), "commands", {}), "run"}
    used = set(re.findall(r"laminar ([a-z]+)\b", (ROOT / "docs" / "quickstart.md").read_text()))
    assert known - used == set()
    assert used - known == set()
