"""SnapKV: what the last queries of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvest.observe import attended, query_weights
from kvest.propose._base import Propose, last, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class SnapKV(Propose):
    """score_i = mean over i's `pool` neighbours of mean_{g, j} p_j(i),  j: the last `window` queries

    Source: SnapKV, arXiv:2404.14469.
    Unlike the paper: which recent entries stay for sure is the policy's `window`, not the observed queries; at the ends
    of the sequence the pool averages over the neighbours that exist (made entries are nobody's); in later rounds of a
    standing budget only the queries since the last round are looked at.
    `peer=True`: as kvpress 0.5.5, whose pool ends before the observed queries' own entries, and divides by its full
    size at both ends; it keeps those entries whatever the budget, as a policy of `window=64, sinks=0` does.
    """

    window: int = 64
    pool: int = 5
    peer: bool = False
    attends = True

    def __post_init__(self) -> None:
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(
                f"snapkv needs window >= 1 and an odd pool >= 1, not window={self.window}, pool={self.pool}"
            )

    @property
    def queries(self) -> int | None:
        return self.window

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, self.window)
        weights = query_weights(newest) / newest.query_lengths[:, None].clamp_min(1)
        score = attended(newest, weights)
        if self.peer:
            observed = observation.positions >= (observation.seen - newest.query_lengths)[:, None, None]
            pooled = self._pooled(score.masked_fill(observed, 0.0))
            return propose_score(observation, torch.where(observed, pooled.amax(dim=-1, keepdim=True), pooled))
        tokens = (observation.valid & ~observation.made).float()
        return propose_score(observation, self._pooled(score * tokens) / self._pooled(tokens).clamp_min(1e-6))

    def _pooled(self, x: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
        """Means over `pool` neighbours, of which those beyond the ends count as 0."""
        return avg_pool1d(x, self.pool, stride=1, padding=self.pool // 2)
