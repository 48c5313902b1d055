"""Knorm: keys with a small norm are attended most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal

SPREAD = 60.0
"""Nats between the largest and the smallest score: designs tell scores apart down to 1e-30 of the largest."""


@dataclass(frozen=True)
class KeyNorm(Propose):
    """score_i = softmax_i(-norm(k_i) / c),  c = max(1, (max norm - min norm) / 60)

    Source: arXiv:2406.11430, which ranks by -norm(k_i).
    Unlike the paper: the softmax makes the same ranking a non-negative proposal; c is 1 where norms lie within 60 of
    each other, and keeps exponentials apart where they do not.
    """

    def __call__(self, observation: Observation) -> Proposal:
        norms = torch.linalg.vector_norm(observation.keys.float(), dim=-1)
        least = norms.masked_fill(~observation.valid, torch.inf).amin(dim=-1, keepdim=True)
        excess = (norms - least).masked_fill(~observation.valid, 0.0)
        scaled = excess / (excess.amax(dim=-1, keepdim=True) / SPREAD).clamp_min(1.0)
        return propose_score(observation, torch.softmax((-scaled).masked_fill(~observation.valid, -torch.inf), dim=-1))
