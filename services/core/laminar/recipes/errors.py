"""What a person can act on when a recipe cannot be built."""

from __future__ import annotations


class RecipeError(Exception):
    """One paragraph for the terminal: what is missing or wrong, and what to do. The command exits 2."""
