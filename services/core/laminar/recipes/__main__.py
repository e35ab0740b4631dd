"""`python -m laminar.recipes build NAME` and `list`: one JSON line on stdout, progress as plain lines on stderr.

Exit status: 0 done, 2 something that a person must change (one paragraph on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from laminar.recipes.cache import default_cache, entry_name, obtain
from laminar.recipes.catalog import RECIPE_VERSION, RECIPES, Order
from laminar.recipes.errors import RecipeError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            return _list()
        return _build(options.name, options.cache, options.seed, options.threads)
    except RecipeError as error:
        _report(str(error))
        return 2
    except OSError as error:
        _report(f"The recipe cache cannot be written: {error}. Use another folder with --cache DIR or LAMINAR_CACHE.")
        return 2
    except KeyboardInterrupt:
        return 130


def _list() -> int:
    for recipe in RECIPES.values():
        print(json.dumps({"name": recipe.name, "kind": recipe.kind.value, "about": recipe.about}))
    return 0


def _build(name: str, cache: Path, seed: int, threads: int) -> int:
    recipe = RECIPES.get(name)
    if recipe is None:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(f"There is no recipe {name!r}.{hint} There are: {', '.join(RECIPES)}.")
    os.environ.update(_library_settings(threads))
    entry = obtain(
        cache.expanduser().resolve(),
        entry_name(recipe.name, RECIPE_VERSION, recipe.made_from(seed)),
        lambda folder: recipe.build(Order(folder, seed, threads, _report)),
        _report,
    )
    made = {
        "name": recipe.name,
        "kind": recipe.kind.value,
        "path": str(recipe.product(entry.path)),
        "cached": entry.cached,
        "seconds": round(entry.seconds, 3),
    }
    print(json.dumps(made), flush=True)
    return 0


def _library_settings(threads: int) -> dict[str, str]:
    """Read by the libraries when they are imported, which the builders do."""
    return {
        "OMP_NUM_THREADS": str(threads),  # a thread per core makes tiny models slower, not faster
        "HF_HUB_OFFLINE": "1",  # everything is local: a lookup could only delay
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # progress is plain lines, one each
        "TQDM_DISABLE": "1",
    }


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m laminar.recipes", description="Makes small models and data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="one JSON line for each recipe")
    build = commands.add_parser("build", help="make a recipe, or find it in the cache; one JSON line with its path")
    build.add_argument("name")
    build.add_argument("--cache", type=Path, default=default_cache(), help="default: LAMINAR_CACHE, or %(default)s")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--threads", type=_positive, default=1, help="torch threads (default 1)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
