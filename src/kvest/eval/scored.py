"""A prompt that is read and scored once, and evicted as often as one likes, to any counts, by the same scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.allocate import Allocate
from kvest.eval.prefill import Prefill
from kvest.hf import EvictionCache
from kvest.hf.layer import EvictionLayer
from kvest.policy import Policy
from kvest.random import Stream
from kvest.retain import Store
from kvest.sample import Design
from kvest.sample._base import candidates
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class _Everything(Allocate):
    """Every head keeps all that it has; what was proposed for each layer is remembered."""

    proposals: list[Proposal] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    whole_model = True

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        self.proposals.extend(proposals)
        self.observations.extend(observations)
        return [o.lengths for o in observations]


class Scored:
    """A prompt as `policy` scores it, held whole; `proposals` and `observations` are those of the evicted layers."""

    def __init__(self, prefill: Prefill, policy: Policy) -> None:
        everything = _Everything()
        self.policy = policy
        self._cache = prefill.evict(replace(policy, allocate=everything))
        self._cache.session.policy = policy  # which a report can name
        self.proposals, self.observations = everything.proposals, everything.observations
        self._layers = [layer for layer in self._cache.layers if isinstance(layer, EvictionLayer)]

    @contextmanager
    def evicted(self, counts: Mapping[int, Int[Tensor, "b h"]], seed: int = 0) -> Iterator[EvictionCache]:
        """For the block, the cache in which the heads of these evicted layers keep so many entries, others all."""
        kept = {layer: self._keep(layer, mine, seed) for layer, mine in counts.items()}
        with self._cache.branch() as cache:
            for layer, store in kept.items():
                self._layers[layer].store = store
            yield cache

    def _keep(self, layer: int, counts: Int[Tensor, "b h"], seed: int) -> Store:
        stream = Stream(seed, self._layers[layer].index, [0] * len(counts))
        return Store(self.policy.keep(self.observations[layer], self.proposals[layer], counts, stream))

    def one_head(self, layer: int, head: int, keep: float) -> Int[Tensor, "b h"]:
        """Counts of a layer in which one head keeps a share of its entries, and what is certain at least."""
        counts, certain = self.observations[layer].lengths.clone(), self.proposals[layer].certain
        some = (keep * counts[:, head].double() + 1e-9).floor().long()
        counts[:, head] = some.maximum(certain[:, head].sum(dim=-1))
        return counts

    def variance(self, layer: int, counts: Int[Tensor, "b h"]) -> Float[Tensor, "b h"]:
        """sum_i x_i^2 (1 / pi_i - 1) over what each head draws from, when it keeps so many."""
        observation, proposal = self.observations[layer], self.proposals[layer]
        score, _ = candidates(proposal, observation.valid)
        stream = Stream(0, layer, [0] * len(counts))
        pi = self.policy.design(proposal, observation.valid, counts, observation.positions, stream).inclusion
        return torch.where(pi > 0, score**2 * (1 / pi - 1), 0.0).sum(dim=-1)
