"""Systematic sampling: one random start, then equal steps along the cumulated probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Proportional, cumulated, proportional
from kvest.types import Draw


@dataclass(frozen=True)
class Systematic(Proportional):
    """pi_i = min(1, c x_i); with one uniform u per head, entry i is kept when some u + n (n = 0, 1, ...) falls into
    [C_{i-1}, C_i), C the cumulated pi in the order of positions

    Exactly m entries. Implicitly stratified: every stretch of the context gets its share, give or take one entry.
    Joint probabilities can be 0, so its variance has no unbiased estimate. Source: Madow 1949,
    doi:10.1214/aoms/1177730031.
    """

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        inclusion = proportional(score, counts)
        full = inclusion >= 1.0
        part = inclusion.masked_fill(full, 0.0)
        sums, whole = cumulated(part)
        points = (sums - stream.one(positions)).ceil().clamp_min(0.0).clamp_max(whole)  # points below C_i
        points = torch.where(sums >= whole, whole, points)  # none is lost to rounding at the end
        keep = full | (points.diff(dim=-1, prepend=points[..., :1] * 0) > 0)
        return Draw(keep, inclusion, keep.long(), inclusion)
