"""`kvest explain`: what each part of a policy does, its formula, its source, and what it needs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvest.cli.shared import check_writable, write_json
from kvest.grammar import say
from kvest.named import NAMED
from kvest.policy import Policy

STAGES = ("propose", "allocate", "design", "correct", "stand_in")
"""Fields of a policy that are parts, in the order in which they act."""


def explain(sentence: str, json: Path | None = None) -> None:
    """Print every part of a policy with its formula."""
    check_writable(json)
    policy = parse(sentence)
    rows = [row for stage in STAGES if hasattr(policy, stage) for row in described(stage, getattr(policy, stage))]
    console = Console()
    console.print(f"[bold]{escape(str(policy))}[/bold]", soft_wrap=True)
    for row in rows:
        console.print()
        depth = 2 * row["depth"]
        console.print(Padding(f"[bold]{row['stage']}[/bold]  {escape(row['part'])}", (0, 0, 0, depth)))
        for paragraph in (row["formula"], *row["text"]):
            console.print(Padding(escape(paragraph), (0, 0, 0, depth + 4)))
        for label, text in (("source", row["source"]), ("unlike the paper", row["unlike"]), ("needs", row["needs"])):
            if text:
                text = "; ".join(text) if isinstance(text, list) else text
                console.print(Padding(f"[dim]{label}:[/dim] {escape(text)}", (0, 0, 0, depth + 4)))
    console.print()
    console.print(Padding(f"[bold]budget[/bold]  {escape(budget(policy))}", (0, 0, 0, 0)))
    if json is not None:
        write_json(json, {"policy": str(policy), "parts": rows, "budget": budget(policy)})


def parse(sentence: str) -> Policy:
    """A policy, a named one without its budget, or any sentence without its budget (a quarter then)."""
    text = sentence.strip()
    return Policy.parse(text if "@" in text else f"{NAMED.get(text, text)}@0.25")


def described(stage: str, part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """One row for a part, and one for each part that it holds."""
    yield {
        "stage": stage,
        "part": say(part),
        "depth": depth,
        **documented(type(part)),
        "needs": needs(part),
    }
    for f in fields(part):
        inner = getattr(part, f.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            yield from described(f.name, inner, depth + 1)


def documented(kind: type) -> dict[str, Any]:
    """A docstring's formula (its first paragraph), the rest, its source, and where it departs from it."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(kind.__doc__ or ""))
    text, _, unlike = text.partition("Unlike the paper: ")
    text, _, source = text.partition("Source: ")
    formula, *rest = [paragraph.strip() for paragraph in text.split("\n\n")]
    return {"formula": formula, "text": [p for p in rest if p], "source": source.strip(), "unlike": unlike.strip()}


def needs(part: Any) -> list[str]:
    """What a part looks at besides the entries themselves, and what it costs to have it."""
    queries = getattr(part, "queries", 0)
    found = {
        "every query of the prompt": queries is None,
        "the last query" if queries == 1 else f"the last {queries} queries": bool(queries),
        "extra passes through the model: cache.prepare(...)": getattr(part, "extra_passes", False),
        "the rotary embedding, to undo it": getattr(part, "needs_rotation", False),
        "the layer's output projection W_O": getattr(part, "needs_output", False),
        "a table of the model's heads (kvest calibrate)": getattr(part, "needs_calibration", False),
        "the attention collected in earlier rounds (4 bytes an entry)": getattr(part, "carries", False),
        "all layers at once: the prompt's cache is held until the last one": getattr(part, "whole_model", False),
        "top_k/none: most entries score 0": getattr(part, "deterministic_only", False),
    }
    return [need for need, given in found.items() if given]


def budget(policy: Policy) -> str:
    """What is kept, and when it is brought down to that."""
    once = "evicted once, after the prompt"
    when = once if policy.every is None else f"evicted again whenever {policy.every} entries have come on top"
    kind = (type(policy.budget).__doc__ or "").strip().splitlines()[0].rstrip(".")
    return f"{policy.budget}: {kind}; {when}; {policy.sinks} sinks and a window of {policy.window} always stay"
