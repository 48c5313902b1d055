"""pi_min-h: attention of all queries, the recent ones weighing more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.observe import attended
from kvest.propose._base import Propose, at_least, last, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Harmonic(Propose):
    """score_i = norm(v_i) sum_j h_j mean_g p_j(i),  h_j proportional to 1 / (t - j + 1)  (t: the last query)

    `rows=256` looks at 256 queries only, spaced so that each stands for the same mass of h (cheaper, and worse: rare
    strong attention is missed). `values=False` leaves norm(v_i) out.
    Source: pi_min-h of A Probabilistic Interpretation of KV Cache Eviction; this reading of its prior is ours.
    """

    rows: int | None = None
    values: bool = True
    attends = True

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows)

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, observation.queries.shape[3])
        q = newest.queries.shape[3]
        prior = 1.0 / torch.arange(q, 0, -1, device=newest.queries.device, dtype=torch.float64)
        weights, slots = newest.query_valid * prior, None
        if self.rows is not None and self.rows < q:
            sampled = (newest.query_lengths > self.rows)[:, None]  # a shorter row looks at all of its queries
            weights = torch.where(sampled, _quantiles(weights, self.rows), weights)
            slots = weights.any(dim=0).nonzero()[:, 0]
            weights = weights[:, slots]
        weights = (weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-300)).float()
        score = attended(newest, weights, slots)
        return propose_score(observation, score * value_norms(observation) if self.values else score)


def _quantiles(prior: Float[Tensor, "b q"], rows: int) -> Float[Tensor, "b q"]:
    """1 at the midpoints of `rows` equal shares of each row's mass, once each; 0 elsewhere."""
    mass = prior.cumsum(1) / prior.sum(dim=1, keepdim=True).clamp_min(1e-300)
    points = (torch.arange(rows, device=prior.device, dtype=prior.dtype) + 0.5) / rows
    slots = torch.searchsorted(mass, points.expand(len(prior), rows).contiguous()).clamp_max(prior.shape[1] - 1)
    return torch.zeros_like(prior).scatter_(1, slots, 1.0)
