"""Compactor: keys that stand alone, blended with attention that is not causal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvest.propose._base import Propose, pooled, propose_score, tokens
from kvest.propose.leverage import Leverage
from kvest.propose.noncausal import NonCausal
from kvest.types import Observation, Proposal

FIRST, LAST = 8, 4
"""Entries at both ends that the method keeps."""
POOL = 3


@dataclass(frozen=True)
class Compactor(Propose):
    """score_i = blend z_i(leverage) + z_i(n) - the head's least,  n_i = mean of noncausal over i and its 2 neighbours

    z_i(x) = (x_i - mean x) / std x over the head's entries; what does not vary counts 0. `sketch`, `ridge` and `seed`
    are those of `leverage`, `chunk` is that of `noncausal`. The first 8 positions and the last 4 are certain to stay,
    as far as sinks and window leave room in the budget.

    Source: Compactor, arXiv:2507.08143, and its code in kvpress 0.5.5.
    Unlike the paper: shifted to be non-negative, so that the head's least entry is never drawn at random; means,
    spreads and chunks run over all entries, those at both ends included; at the ends the pool averages over the
    neighbours that exist. kvpress 0.5.5 blends by its compression ratio, and standardises over all heads and rows at
    once; with its sketch, which is never the same twice, its scores cannot be reproduced.
    """

    blend: float = 0.35
    sketch: int = 48
    ridge: float = 1e-2
    chunk: int = 256
    seed: int = 0
    attends = True
    needs_rotation = True

    def __post_init__(self) -> None:
        if not self.blend >= 0:
            raise ValueError(f"compactor needs blend >= 0, not {self.blend!r}")
        self._parts()  # which check their knobs

    def _parts(self) -> tuple[Leverage, NonCausal]:
        return Leverage(self.sketch, self.ridge, self.seed), NonCausal(self.chunk)

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        counted = tokens(observation)
        leverage, attention = (part(observation).score for part in self._parts())
        score = self.blend * _standard(leverage, counted) + _standard(pooled(attention, counted, POOL), counted)
        score = score - score.masked_fill(~counted, torch.inf).amin(dim=-1, keepdim=True).clamp_max(1e30)
        ends = (observation.positions < FIRST) | (observation.positions >= (observation.seen - LAST)[:, None, None])
        taken = observation.protected
        wanted = ends & counted & ~taken
        room = observation.budget[:, None, None] - taken.sum(dim=-1, keepdim=True)
        certain = wanted & (wanted.cumsum(dim=-1) <= room)
        return Proposal(propose_score(observation, score.masked_fill(~counted, 0.0)).score, certain)


def _standard(x: Float[Tensor, "b h t"], counted: Bool[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """z-scores over the entries that count; 0 where they differ by rounding only."""
    count = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    x = x.double().masked_fill(~counted, 0.0)
    mean = x.sum(dim=-1, keepdim=True) / count
    apart = (x - mean).masked_fill(~counted, 0.0)
    std = (apart.square().sum(dim=-1, keepdim=True) / count).sqrt()
    varies = (std > 1e-5 * mean.abs()) & (std > 1e-9)
    return torch.where(varies, apart / std, 0.0).float()
