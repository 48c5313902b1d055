"""Poisson sampling: an independent coin for every entry."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Proportional, proportional
from kvest.types import Draw


@dataclass(frozen=True)
class Poisson(Proportional):
    """pi_i = min(1, c x_i); entry i is kept when u_i < pi_i, independently. The number kept is random, its mean is m.

    Joint probabilities are products, so the variance of its estimates is known exactly. Source: Sarndal, Swensson and
    Wretman, Model Assisted Survey Sampling, 1992, section 3.5.
    """

    fixed_size = False

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        inclusion = proportional(score, counts)
        keep = stream.uniform(positions) < inclusion
        return Draw(keep, inclusion, keep.long(), inclusion)
