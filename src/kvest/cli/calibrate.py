"""`kvest calibrate`: what the budget of each head is worth, measured once per model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvest.cli.shared import STDERR, check_distinct, check_writable, conditions, load_model, read_document, write_json
from kvest.eval.calibrate import calibrate as measure
from kvest.eval.calibrate import passes
from kvest.eval.document import speeches
from kvest.hf.calibration import Calibration, default_path, save


def calibrate(
    name: str,
    texts: list[Path],
    method: str,
    tokens: int,
    seed: int,
    dtype: str,
    device: str,
    output: Path | None,
    json: Path | None,
) -> None:
    """Measure with a progress bar, write the table, and say where it is."""
    given = {str(path): read_document(path, option="--texts ") or "" for path in texts} or speeches()
    for path in (output, json):
        check_writable(path)
    check_distinct(*texts, output, json)
    model, tokenizer = load_model(name, dtype, device)
    ids = {each: tokenizer(text, return_tensors="pt").input_ids for each, text in given.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=STDERR, transient=True) as progress:
        task = progress.add_task(f"measuring {name} by {method}", total=passes(model, method, len(ids)))
        table = measure(
            model, ids, method, tokens=tokens, seed=seed, on_pass=lambda: progress.update(task, advance=1), name=name
        )
    path = output or default_path(model, method)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(table, path)
    layers, heads = table.importance.shape
    shape = f"{layers} layers of {heads} KV heads"
    STDERR.print(Text(f"measured     {shape}, by {method}, on {len(ids)} texts", style="dim"))
    STDERR.print(Text(f"written      {path}", style="dim"))
    if json is not None:
        write_json(json, {**_plain(table), "file": str(path), "conditions": conditions(model, name)})


def _plain(table: Calibration) -> dict[str, Any]:
    """The table as plain values, without the samples of weights."""
    damage = None if table.damage is None else table.damage.tolist()
    return {**asdict(table.about), "importance": table.importance.tolist(), "damage": damage}
