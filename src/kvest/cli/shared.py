"""What the commands have in common: reading the input, loading the model, writing the record."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import kvest

STDERR = Console(stderr=True)


def read_document(path: Path | None, option: str = "--prompt-file ") -> str | None:
    """The text of a file, or of standard input for `-`; None where no file is given."""
    if path is None:
        return None
    if str(path) == "-":
        return sys.stdin.read()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"no file {str(path)!r}: give {option}a text file, or - for standard input") from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"cannot read {str(path)!r} as text in UTF-8: {error}") from None
    if not text.strip():
        raise ValueError(f"{str(path)!r} is empty: there is nothing to read")
    return text


def load_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """(model, tokenizer), with a word on standard error while it takes time."""
    import torch
    from transformers.utils import logging

    from kvest.hf.embedded import EMBEDDED, is_converted, load

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {device!r} here: {str(error).splitlines()[0]}") from None
    once = " (converting it once)" if name in EMBEDDED and not is_converted(name) else ""
    with STDERR.status(f"loading {name}{once}"):
        return load(name, dtype=getattr(torch, dtype), device=device)


def read(cache: Any, ids: Any, tokenizer: Any) -> None:
    """Read a document into `cache`, with a word on standard error, or a bar where the model repeats it."""
    bar = bool(cache.policy.propose.extra_passes)
    with nullcontext() if bar else STDERR.status(f"reading {ids.shape[1]:,} tokens"):
        cache.prepare(ids, tokenizer=tokenizer, progress=bar)


def context_of(model: Any) -> int | None:
    """How many tokens the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def conditions(model: Any, name: str) -> dict[str, Any]:
    """Under what a number was measured."""
    import torch

    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "kvest": kvest.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def check_writable(path: Path | None) -> None:
    """Raise before the work rather than after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {str(path)!r}: no folder {str(path.parent)!r} that can be written to")


def check_distinct(*paths: Path | None) -> None:
    """Raise where one file would be written over another of this command."""
    given = [path for path in paths if path is not None and str(path) != "-"]
    for i, path in enumerate(given):
        if any(path.resolve() == other.resolve() for other in given[:i]):
            raise ValueError(f"{str(path)!r} is named twice: writing it would lose the other")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a whole file or none."""
    from kvest.hf.storage import whole_file

    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
