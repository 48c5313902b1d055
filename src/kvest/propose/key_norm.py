"""Knorm: keys with a small norm are attended most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class KeyNorm(Propose):
    """score_i = softmax_i(-norm(k_i))

    Source: arXiv:2406.11430, which ranks by -norm(k_i).
    Unlike the paper: the softmax makes the same ranking a non-negative proposal.
    """

    def __call__(self, observation: Observation) -> Proposal:
        norms = torch.linalg.vector_norm(observation.keys.float(), dim=-1)
        return propose_score(observation, torch.softmax((-norms).masked_fill(~observation.valid, -torch.inf), dim=-1))
