"""Pareto sampling: every entry has a random rank, the first m stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Proportional, proportional
from kvest.types import Draw


@dataclass(frozen=True)
class Pareto(Proportional):
    """The m entries of the smallest odds(u_i) / odds(pi_i) are kept,  odds(p) = p / (1 - p),  pi_i = min(1, c x_i)

    Exactly m entries, otherwise nearly as random as independent coins: close to Poisson sampling, given its size. An
    entry's number does not depend on the others, so that samples of two budgets overlap as far as they can.
    The stated pi_i is approximate: P(entry kept) differs by the order of 1 / sum pi (1 - pi), as corrected sums do.
    Source: Rosen 1997, doi:10.1016/S0378-3758(96)00186-3.
    """

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        inclusion = proportional(score, counts)
        u = stream.uniform(positions)
        rank = u * (1.0 - inclusion) / ((1.0 - u) * inclusion.clamp_min(1e-300))
        rank = rank.masked_fill(inclusion >= 1.0, -1.0).masked_fill(score <= 0, torch.inf)
        order = rank.argsort(dim=-1, stable=True)
        first = torch.arange(score.shape[-1], device=score.device) < counts[..., None]
        keep = torch.zeros_like(first).scatter_(-1, order, first) & (score > 0)
        return Draw(keep, inclusion, keep.long(), inclusion)
