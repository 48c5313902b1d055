"""One prefill that serves many policies.

Under a one-shot policy the prompt's own pass is exact, so every policy sees the same queries, keys and values. A
`Prefill` computes them once and evicts copies of the cache; the result is the one that `EvictionCache` reaches alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvest.budget import Fraction
from kvest.correct import NoCorrection
from kvest.hf import EvictionCache
from kvest.hf.compat import CACHE_ARGUMENT
from kvest.hf.layer import EvictionLayer
from kvest.hf.prepare import read, repeat_and_evict
from kvest.hf.request import request
from kvest.policy import Policy
from kvest.propose import H2O
from kvest.sample import TopK

_RECORD = Policy(H2O(), TopK(), NoCorrection(), Fraction(1.0), every=1 << 40)
"""Evicts nothing and, since a standing `h2o` looks at all queries, remembers every one of them."""


class Prefill:
    """A prompt read once by `model`; `logits` are those of its last token. `tokenizer` is that of `prepare`."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Int[Tensor, "b t"],
        attention_mask: Int[Tensor, "b t"] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.ids, self.attention_mask, self.tokenizer = model, ids, attention_mask, tokenizer
        self._full = EvictionCache(model, _RECORD)
        with torch.no_grad():
            self.logits: Float[Tensor, "b v"] = read(model, self._full, ids, attention_mask)[:, -1]

    def evict(self, policy: Policy, seed: int = 0) -> EvictionCache:
        """A cache as if this prompt had been read with it. The policy must be one-shot."""
        if policy.every is not None:
            raise ValueError("a standing budget evicts within the prompt's chunks: read the prompt with its own cache")
        cache = EvictionCache(self.model, policy, seed=seed)
        rows, tokens = self.ids.shape
        asked = request(self.model, self.tokenizer) if policy.propose.extra_passes else None
        cache.session.puts_off = asked is not None
        cache.session.begin(self.attention_mask, rows, tokens, 0)
        with torch.no_grad():
            for index, (layer, full) in enumerate(zip(cache.layers, self._full.layers, strict=True)):
                if not isinstance(layer, EvictionLayer):
                    cache.layers[index] = copy.deepcopy(full)
                    continue
                layer.module, layer.normalizers = full.module, full.normalizers
                layer.update(full.keys, full.values)
                layer.attend(full.queries[0], full.scale, lambda: (self.ids, None))
                cache.session.after(layer)
            if asked is not None:
                repeat_and_evict(cache, self.model, self.ids, self.attention_mask, asked)
        return cache

    def full(self) -> EvictionCache:
        """The whole cache, which attends with the model's own attention."""
        return self.evict(Policy(H2O(), TopK(), NoCorrection(), Fraction(1.0)))


def run(
    model: PreTrainedModel,
    ids: Int[Tensor, "b n"],
    cache: EvictionCache,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """A forward pass through `cache`, under the name that this release of transformers gives it."""
    return model(ids, attention_mask=attention_mask, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs)
