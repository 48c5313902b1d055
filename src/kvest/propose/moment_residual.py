"""MomentKV's score: attention times what the moments of a head would get wrong about a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvest.observe import attended, query_weights
from kvest.propose._base import Propose, at_least, last, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class MomentResidual(Propose):
    """score_i = a_i norm(v_i - v - s C k_i),  a_i = mean_{g, j} p_j(i),  j: the last `window` queries

    v and k are the means of all the head's values and keys, C = mean_i (v_i - v)(k_i - k)^T, s the scale: v + s C k_i
    is what a first-order expansion of the head says about a query that equals k_i. What it says well may go, and
    `moments` stands in for it. An entry that was kept before counts by its weight.

    Source: MomentKV, arXiv:2606.01563.
    Unlike the paper: moments are those of all entries, not of those that are gone; entries go one by one, not in blocks
    of 4 (`chunked(moment_residual, 4)` has blocks of 4).
    """

    window: int = 64
    attends = True

    def __post_init__(self) -> None:
        at_least(1, window=self.window)

    @property
    def queries(self) -> int | None:
        return self.window

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, self.window)
        attention = attended(newest, query_weights(newest) / newest.query_lengths[:, None].clamp_min(1))
        weights = observation.log_weights.exp() * observation.valid
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        missing = ~observation.valid[..., None]
        keys, values = (x.float().masked_fill(missing, 0.0) for x in (observation.keys, observation.values))
        center = weights[..., None, :] @ keys
        values = values - weights[..., None, :] @ values
        slope = (values * weights[..., None]).transpose(2, 3) @ (keys - center)
        residual = values - observation.scale * (keys @ slope.transpose(2, 3))
        return propose_score(observation, attention * torch.linalg.vector_norm(residual, dim=-1))
