"""Policies side by side on one prompt: what they keep, what they answer, how far they are from the full cache."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvest.eval.document import Prompt
from kvest.eval.prefill import Prefill, run
from kvest.hf import EvictionCache
from kvest.hf.compat import CACHE_ARGUMENT
from kvest.policy import Policy

FULL = "full cache"
CONTINUATION = 64
"""Tokens of the full cache's own greedy continuation of the document over which the KL is taken."""
STEPS = 24
"""Decode steps that are timed, one token each."""


@dataclass(frozen=True)
class Row:
    """One policy: entries per head over the evicted layers, bytes held and elsewhere, the answer, and the two costs.

    `kl_nats` is the mean over `kl_tokens` teacher-forced tokens of KL(full || evicted) of the next token, `kl_error`
    its standard error over tokens (successive tokens are not independent: it is a lower bound). `tokens_per_s` is from
    the median of `STEPS` decode steps right after the document, `evict_s` the time of scoring and evicting.
    """

    policy: str
    kept_mean: float
    kept_min: int
    kept_max: int
    kept_bytes: int
    full_bytes: int
    elsewhere_bytes: int
    answer: str
    kl_nats: float
    kl_error: float
    kl_tokens: int
    tokens_per_s: float
    evict_s: float
    seed: int

    def record(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    policies: Sequence[Policy],
    *,
    seed: int = 0,
    max_new_tokens: int = 32,
    on_read: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """The full cache first, then each policy. The document is read once and evicted before the question is known."""
    prefill = Prefill(model, prompt.document, tokenizer=tokenizer)
    on_read()
    full = prefill.full()
    continuation = greedy(model, copy.deepcopy(full), prefill.logits, CONTINUATION)
    reference = forced(model, copy.deepcopy(full), continuation)
    caches: list[tuple[str, Callable[[], EvictionCache]]] = [(FULL, prefill.full)]
    caches += [(str(policy), lambda policy=policy: prefill.evict(policy, seed)) for policy in policies]  # type: ignore[misc]
    for name, make in caches:
        start = time.perf_counter()
        cache = make()
        evict_s = time.perf_counter() - start
        report = cache.report()
        kept = report.kept[report.evicted_layers].double()
        kl = divergence(reference, forced(model, copy.deepcopy(cache), continuation))
        yield Row(
            policy=name,
            kept_mean=kept.mean().item(),
            kept_min=int(kept.min()),
            kept_max=int(kept.max()),
            kept_bytes=report.kept_bytes,
            full_bytes=report.full_bytes,
            elsewhere_bytes=report.elsewhere_bytes,
            answer=answer(model, tokenizer, copy.deepcopy(cache), prompt, max_new_tokens),
            kl_nats=kl.mean().item(),
            kl_error=(kl.std() / len(kl) ** 0.5).item(),
            kl_tokens=len(kl),
            tokens_per_s=1.0 / statistics.median(_step_times(model, cache, continuation)),
            evict_s=0.0 if name == FULL else evict_s,
            seed=seed,
        )


def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: EvictionCache,
    prompt: Prompt,
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
) -> str:
    """Ask; the model's greedy answer through the ordinary generate()."""
    ids = torch.cat([prompt.document, prompt.question], dim=1).to(model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=streamer,
        **{CACHE_ARGUMENT: cache},
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


@torch.no_grad()
def greedy(
    model: PreTrainedModel, cache: EvictionCache, logits: Float[Tensor, "b v"], tokens: int
) -> Int[Tensor, "b n"]:
    """The greedy continuation of what `cache` holds."""
    chosen = [logits.argmax(dim=-1, keepdim=True)]
    for _ in range(tokens - 1):
        chosen.append(run(model, chosen[-1], cache).logits[:, -1].argmax(dim=-1, keepdim=True))
    return torch.cat(chosen, dim=1)


@torch.no_grad()
def forced(model: PreTrainedModel, cache: EvictionCache, tokens: Int[Tensor, "1 n"]) -> Float[Tensor, "n v"]:
    """Log probabilities of the next token after each of `tokens`."""
    return run(model, tokens, cache).logits[0].double().log_softmax(dim=-1)


def divergence(full: Float[Tensor, "n v"], evicted: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    return (full.exp() * (full - evicted)).sum(dim=-1)


@torch.no_grad()
def _step_times(model: PreTrainedModel, cache: EvictionCache, tokens: Int[Tensor, "1 n"]) -> list[float]:
    """Seconds of single decode steps; the first two warm up."""
    times = []
    for i in range(STEPS + 2):
        start = time.perf_counter()
        run(model, tokens[:, i : i + 1], cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[2:]
