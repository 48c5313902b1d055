"""Top-k: the largest scores, always. The zero-variance, biased special case of sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Design
from kvest.types import Draw


@dataclass(frozen=True)
class TopK(Design):
    """pi_i = 1 for the m largest scores, else 0; of equal scores the most recent stay

    No estimate of its error exists: evicted values can change without changing anything that is kept.
    """

    random = False

    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        return ((score * rate >= 1.0) & (score > 0)).double()

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        order = score.shape[-1] - 1 - newest_first
        first = torch.arange(score.shape[-1], device=score.device) < counts[..., None]
        keep = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, first) & (score > 0)
        return Draw(keep, keep.double(), keep.long(), keep.double())
