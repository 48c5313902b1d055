"""Cluster sampling: neighbouring entries are drawn together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.neighbours import groups, sums
from kvest.random import Stream
from kvest.sample._base import Design
from kvest.types import Draw


@dataclass(frozen=True)
class Clusters(Design):
    """pi_i = pi_C of the cluster C that i is in: `size` neighbouring positions, drawn by `design` by x_C = sum_C x_i

    A fact is longer than a token. Clusters are counted from position 0; certain entries (sinks, window) are in none.
    The number of clusters is the whole number n at which the expected number of entries, sum_C pi_C |C|, comes nearest
    to m from below, or n + 1, at random such that the mean is m. How many are kept varies by about a cluster's size;
    a design without chance takes n.
    Source: cluster sampling, Sarndal, Swensson and Wretman, Model Assisted Survey Sampling, 1992, section 4.2.
    """

    design: Design
    size: int = 8
    fixed_size = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"clusters needs a size that is a whole number of at least 1, not {self.size!r}")
        if self.design.queries:
            raise ValueError("clusters draws once, by scores alone: write best_of(clusters(...)), not the reverse")

    @property
    def random(self) -> bool:  # type: ignore[override]  # of the inner design
        return self.design.random

    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        group, names = self._clusters(score, positions)
        pi = self.design.inclusion(sums(score, group), rate, names)
        return pi.gather(-1, group) * (score > 0)

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        group, names = self._clusters(score, positions)
        mass, members = sums(score, group), sums((score > 0).double(), group)

        def drawn(clusters: Int[Tensor, "b h"]) -> tuple[Draw, Float[Tensor, "b h"]]:
            draw = self.design.draw(mass, clusters, names, stream)
            return draw, (draw.inclusion * members).sum(dim=-1)

        most = (mass > 0).sum(dim=-1)
        low, high = torch.zeros_like(most), most
        for _ in range(int(high.max()).bit_length()):
            middle = (low + high + 1) // 2
            fits = drawn(middle)[1] <= counts * (1.0 + 1e-12)
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
        (below, fewer), (above, more) = drawn(low), drawn(torch.minimum(low + 1, most))
        share = ((counts - fewer) / (more - fewer).clamp_min(1e-300)).clamp(0.0, 1.0) * (more > fewer) * self.random
        share = share[..., None]
        another = stream.uniform(torch.full_like(positions[..., :1], -2)) < share
        together = Draw(
            keep=torch.where(another, above.keep, below.keep),
            inclusion=torch.lerp(below.inclusion, above.inclusion, share),
            multiplicity=torch.where(another, above.multiplicity, below.multiplicity),
            expected=torch.lerp(below.expected, above.expected, share),
        )
        return _members(together, group, score > 0)

    def _clusters(
        self, score: Float[Tensor, "b h t"], positions: Int[Tensor, "b h t"]
    ) -> tuple[Int[Tensor, "b h t"], Int[Tensor, "b h t"]]:
        """(slot of each entry's cluster, the clusters' own positions in their slots; -1 where nothing can be drawn)."""
        group = groups(positions, self.size)
        number = positions.div(self.size, rounding_mode="floor").masked_fill(score <= 0, -1)
        return group, torch.full_like(group, -1).scatter_reduce_(-1, group, number, "amax")


def _members(draw: Draw, group: Int[Tensor, "b h t"], free: Tensor) -> Draw:
    """Every free member of a cluster has what the cluster has."""
    return replace(
        draw,
        keep=draw.keep.gather(-1, group) & free,
        inclusion=draw.inclusion.gather(-1, group) * free,
        multiplicity=draw.multiplicity.gather(-1, group) * free,
        expected=draw.expected.gather(-1, group) * free,
    )
