"""LAVa: recent attention, times the largest value of the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvest.observe import blocks, by_head, query_weights
from kvest.propose._base import Propose, last, propose_score, tokens
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Lava(Propose):
    """score_i = max_n norm1(v_n) max_{i' near i} max_g mean_j p_j(i'),  j: the last `window` queries

    Near are `pool` neighbours, i in the middle. The factor is the head's largest L1 norm of a value: it decides between
    heads, not within one.
    Source: LAVa, arXiv:2509.09754.
    Unlike the paper: which recent entries stay for sure is the policy's `window`, not the observed queries; in later
    rounds of a standing budget only the queries since the last round are looked at.
    """

    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"lava needs window >= 1 and an odd pool >= 1, not window={self.window}, pool={self.pool}")

    @property
    def queries(self) -> int | None:
        return self.window

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, self.window)
        weights = query_weights(newest) / newest.query_lengths[:, None].clamp_min(1)
        score = by_head(newest, lambda part, rows: _most(part, weights[rows])) * tokens(observation)
        near = max_pool1d(score, self.pool, stride=1, padding=self.pool // 2)
        norms = observation.values.float().abs().sum(dim=-1).masked_fill(~tokens(observation), 0.0)
        return propose_score(observation, near * norms.amax(dim=-1, keepdim=True))


def _most(observation: Observation, weights: Float[Tensor, "b q"]) -> Float[Tensor, "b h t"]:
    """`max_g sum_j weights_j p_j(i)`"""
    b, h, g, _, _ = observation.queries.shape
    total = torch.zeros(b, h, g, observation.keys.shape[2], device=observation.keys.device)
    for block in blocks(observation):
        weight = weights[:, None, None, block.slots] / block.total
        total[..., : block.mass.shape[-1]] += (weight[..., None, :] @ block.mass)[..., 0, :]
    return total.amax(dim=2)
