"""Do kvest's methods keep what kvpress's keep? Entry by entry, on one prompt of a real model.

Needs kvpress beside kvest, which wants an older transformers: `make parity` runs it in an environment of its own. Both
read the same prompt; what kvpress kept is read off the keys in its cache (of head-wise presses, which drop nothing, off
the mask). The bridge (`kvest.integrations.kvpress`) is compared in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from harness import arguments, finish
from kvest.eval.document import prompt, speech
from kvest.hf import EvictionCache
from kvest.hf.embedded import load
from kvest.integrations.kvpress import proposal
from kvest.policy import Policy

Kept = list[list[set[int]]]
"""Positions kept, of one row: [layer][head]."""


@dataclass(frozen=True)
class Case:
    """One method of theirs and what it is called here. `window` and `sinks` are what their press protects; a `random`
    one is compared with another run of itself as well."""

    press: Callable[[float], Any]
    ours: str
    sinks: int = 0
    window: int = 1
    note: str = ""
    random: bool = False

    def policy(self, keep: float) -> Policy:
        return Policy.parse(f"{self.ours}@{keep}", sinks=self.sinks, window=self.window)


LAST = "kvest always keeps the latest entry"
SKETCH = "its random sketch is never the same twice"
CASES = {
    "SnapKVPress": Case(lambda r: kvpress.SnapKVPress(r), "snapkv(peer=True)/top_k/none", window=64),
    "SnapKVPress (paper)": Case(
        lambda r: kvpress.SnapKVPress(r),
        "snapkv/top_k/none",
        window=64,
        note="without `peer=True` the pool stops at the ends of the prompt, not of what is observed",
    ),
    "TOVAPress": Case(lambda r: kvpress.TOVAPress(r), "last_query(values=False, layer=True)/top_k/none"),
    "KeyDiffPress": Case(lambda r: kvpress.KeyDiffPress(r), "keydiff/top_k/none", note=LAST),
    "KnormPress": Case(
        lambda r: kvpress.KnormPress(r), "key_norm/top_k/none", note=f"{LAST}, and of equal norms the most recent"
    ),
    "CapPress": Case(lambda r: kvpress.CapPress(r), "capkv/top_k/none", sinks=4, note=LAST),
    "LagKVPress": Case(
        lambda r: kvpress.LagKVPress(r), "lagkv(peer=True)/top_k/none", sinks=4, note="ties between lags fall otherwise"
    ),
    "ExpectedAttentionPress": Case(
        lambda r: kvpress.ExpectedAttentionPress(r), "expected_attention(peer=True)/top_k/none", sinks=4, note=LAST
    ),
    "CURPress": Case(lambda r: kvpress.CURPress(r), "curdkv(peer=True)/top_k/none", sinks=4, note=LAST),
    "NonCausalAttnPress": Case(lambda r: kvpress.NonCausalAttnPress(r), "noncausal(peer=True)/top_k/none", note=LAST),
    "ExpectedAttentionPress (default here)": Case(
        lambda r: kvpress.ExpectedAttentionPress(r),
        "expected_attention/top_k/none",
        sinks=4,
        note="without `peer=True` the softmax runs over the sinks as well",
    ),
    "LeverageScorePress": Case(
        lambda r: kvpress.LeverageScorePress(r), "leverage/top_k/none", note=SKETCH, random=True
    ),
    "CompactorPress": Case(
        lambda r: kvpress.CompactorPress(r),
        "compactor(blend=0.75)/top_k/none",
        sinks=8,
        window=4,
        note=f"{SKETCH}; z-scores over all heads at once there, over each head here",
        random=True,
    ),
    "PyramidKVPress": Case(
        lambda r: kvpress.PyramidKVPress(r, beta=2),
        "snapkv(peer=True)+pyramid(2)/top_k/none",
        note="a layer's count may be one less or more: each is rounded for itself there, here they sum to the budget",
    ),
    "AdaKVPress(SnapKVPress)": Case(
        lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r)),
        "snapkv(peer=True)+adaptive/top_k/none",
        window=64,
    ),
    "AdaKVPress(ExpectedAttentionPress)": Case(
        lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r)),
        "expected_attention(peer=True)+adaptive/top_k/none",
        sinks=4,
        note=LAST,
    ),
    "CriticalKVPress(SnapKVPress)": Case(
        lambda r: kvpress.CriticalKVPress(kvpress.SnapKVPress(r)),
        "critical(snapkv(peer=True))/top_k/none",
        window=64,
        note="its first stage counts the window's entries, here they come on top of it",
    ),
    "CriticalKVPress(SnapKVPress) (first stage alike)": Case(
        lambda r: kvpress.CriticalKVPress(kvpress.SnapKVPress(r)),
        "critical(snapkv(peer=True), first=0.184)/top_k/none",
        window=64,
        note="0.184 of the budget are the 37 entries that the window leaves of the first stage there",
    ),
    "ChunkKVPress(SnapKVPress)": Case(
        lambda r: kvpress.ChunkKVPress(kvpress.SnapKVPress(r)),
        "chunked(snapkv(peer=True))/top_k/none",
        window=64,
        note="whole chunks there, fewer entries than the budget; here the budget is filled",
    ),
}


def theirs(model: PreTrainedModel, ids: Tensor, press: Any, full: list[Tensor]) -> Kept:
    """What a press keeps of a prompt, whose whole keys are `full`."""
    cache = DynamicCache(config=model.config)
    modules = [layer.self_attn for layer in model.model.layers]
    try:
        with torch.no_grad(), press(model):
            model.model(ids, past_key_values=cache)
        masks = [getattr(module, "masked_key_indices", None) for module in modules]
    finally:
        for module in modules:  # stays on the model, and would mask the next cache's keys
            module.masked_key_indices = None
    kept = []
    for layer, keys, mask in zip(cache.layers, full, masks, strict=True):
        heads = []
        for head in range(keys.shape[1]):
            if mask is None:
                where = {tuple(key): position for position, key in enumerate(keys[0, head].tolist())}
                heads.append({where[tuple(key)] for key in layer.keys[0, head].tolist()})
            else:
                heads.append(set(range(keys.shape[2])) - set(mask[2][mask[1] == head].tolist()))
        kept.append(heads)
    return kept


def ours(model: PreTrainedModel, ids: Tensor, policy: Policy) -> Kept:
    """What a policy keeps of a prompt."""
    cache = EvictionCache(model, policy)
    with torch.no_grad():
        model.model(ids, past_key_values=cache)
    return [[set(head.tolist()) for head in layer[0]] for layer in cache.report().positions]


def compared(ours: Kept, theirs: Kept) -> dict[str, Any]:
    """`same_heads`: the share of heads with equal sets; `same_but_latest`: with sets that are equal once the latest
    entry, which kvest always keeps, has taken the place of one; `overlap`: the mean share of their entries that are
    kept here too; `differ_most`: how many are not, in the head where most are."""
    pairs = [pair for layer in zip(ours, theirs, strict=True) for pair in zip(*layer, strict=True)]
    latest = {max(max(a) for a, _ in pairs)}
    return {
        "heads": len(pairs),
        "same_heads": sum(a == b for a, b in pairs) / len(pairs),
        "same_but_latest": sum(a - b <= latest and len(b - a) <= 1 for a, b in pairs) / len(pairs),
        "overlap": sum(len(a & b) / len(b) for a, b in pairs) / len(pairs),
        "differ_most": max(len(b - a) for a, b in pairs),
    }


def whole_keys(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The prompt's keys, layer by layer."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(ids, past_key_values=cache)
    return [layer.keys for layer in cache.layers]


def bridged(press: Any, keep: float, case: Case) -> Policy:
    """The press itself as a proposal, all else as it is called here."""
    return replace(case.policy(keep), propose=proposal(press))


def main() -> None:
    options = arguments(__doc__ or "", tokens=900, keep=0.25)
    model, tokenizer = load()
    ids = prompt(tokenizer, speech(tokenizer, tokens=options.tokens), "?").document
    full = whole_keys(model, ids)
    rows = []
    for name, case in track(CASES.items(), description="presses"):
        press = case.press(1 - options.keep)
        want = theirs(model, ids, press, full)
        policy = case.policy(options.keep)
        row = {"press": name, "policy": str(policy), "tokens": ids.shape[1], "note": case.note}
        row |= compared(ours(model, ids, policy), want)
        if isinstance(press, kvpress.ScorerPress):
            row["bridge"] = compared(ours(model, ids, bridged(press, options.keep, case)), want)
        if case.random:
            row["itself"] = compared(theirs(model, ids, press, full), want)["overlap"]
        rows.append(row)
        print(row, file=sys.stderr)
    finish(rows, options.json, kvpress=version("kvpress"))


if __name__ == "__main__":
    main()
