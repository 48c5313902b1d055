"""Sampling with replacement: independent draws, the distinct ones stay with their counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Design
from kvest.types import Draw


@dataclass(frozen=True)
class WithReplacement(Design):
    """n draws from x / sum x; pi_i = 1 - (1 - x_i)^n, and c_i, how often i was drawn, has mean n x_i

    n is the whole number at which the expected number of distinct entries, sum_i pi_i, comes nearest to m from below
    (at least 1); at most `most` times the head's entries are drawn, since a very peaked head would need millions to
    fill its budget and gain nothing. The number kept is random.
    Source: A Probabilistic Interpretation of KV Cache Eviction; Hansen and Hurwitz 1943, doi:10.1214/aoms/1177731356.
    """

    most: int = 16
    fixed_size = False

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"with_replacement needs most >= 1, not {self.most!r}")

    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        return distinct(score, rate)

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        draws = self._draws(score, counts)
        largest = int(draws.max()) if draws.numel() else 0
        index = torch.arange(largest, device=score.device).expand(*score.shape[:2], largest)
        points = stream.uniform(index)
        cumulated = score.cumsum(-1)
        cumulated = cumulated / cumulated[..., -1:].clamp_min(1e-300)
        chosen = torch.searchsorted(cumulated, points, right=True).clamp_max(score.shape[-1] - 1)
        counted = (index < draws[..., None]).long()
        multiplicity = torch.zeros_like(positions, dtype=torch.int64).scatter_add_(-1, chosen, counted)
        multiplicity = multiplicity * (score > 0)
        inclusion = distinct(score, draws[..., None].double())
        return Draw(multiplicity > 0, inclusion, multiplicity, draws[..., None] * score)

    def _draws(self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"]) -> Int[Tensor, "b h"]:
        """The largest n with sum_i pi_i <= m, by bisection on whole numbers."""
        entries = (score > 0).sum(dim=-1)
        target = torch.minimum(counts, entries).clamp_min(0)
        low, high = torch.zeros_like(counts), self.most * entries
        for _ in range(int(high.max()).bit_length() if high.numel() else 0):
            middle = (low + high + 1) // 2
            fits = distinct(score, middle[..., None].double()).sum(-1) <= target * (1 + 1e-12)
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
        return torch.where(target > 0, low.clamp_min(1), torch.zeros_like(low))


def distinct(score: Float[Tensor, "b h t"], draws: Float[Tensor, "b #h 1"]) -> Float[Tensor, "b h t"]:
    """1 - (1 - x_i)^n: P(drawn at least once)."""
    return -torch.expm1(draws * torch.log1p(-score.clamp_max(1.0 - 1e-16)))
