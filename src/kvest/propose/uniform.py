"""Uniform: every entry is worth the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Uniform(Propose):
    """score_i = 1

    With sinks and window this is random eviction; with `systematic/inclusion` the plain survey estimate of attention.
    """

    def __call__(self, observation: Observation) -> Proposal:
        return propose_score(observation, torch.ones_like(observation.positions, dtype=torch.float32))
