"""Pivotal sampling: a tournament of entries for their probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Proportional, proportional
from kvest.types import Draw


@dataclass(frozen=True)
class Pivotal(Proportional):
    """pi_i = min(1, c x_i); two entries of probabilities p and q duel: if p + q <= 1, one is out and the other goes on
    with p + q (the first with probability p / (p + q)); else one is kept and the other goes on with p + q - 1 (the
    first is kept with probability (1 - q) / (2 - p - q))

    Exactly m entries, each with probability pi_i. Neighbours duel first, then the winners of neighbouring pairs, so
    that every stretch of the context gets its share. Source: Deville and Tille 1998, doi:10.1093/biomet/85.1.89.
    """

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        inclusion = proportional(score, counts)
        full = inclusion >= 1.0
        t = score.shape[-1]
        rounds = (t - 1).bit_length()
        size = 1 << rounds
        # From the last entry backwards: duels are the same whatever stands in front.
        p = torch.nn.functional.pad(inclusion.masked_fill(full, 0.0).flip(-1), (0, size - t))
        entry = torch.arange(size, device=score.device).expand(p.shape)
        keep = torch.zeros_like(p, dtype=torch.bool)
        u = stream.uniform(entry)
        for n in range(rounds):
            # A duel's number is its place among all of them in the order of entries, whatever the size.
            p, entry, keep = _duels(p, entry, keep, u[..., (1 << n) - 1 :: 2 << n][..., : p.shape[-1] // 2])
        keep = keep.scatter(-1, entry, p > 0.5)[..., :t].flip(-1) | full
        return Draw(keep, inclusion, keep.long(), inclusion)


def _duels(
    p: Float[Tensor, "b h n"], entry: Int[Tensor, "b h n"], keep: Tensor, u: Float[Tensor, "b h k"]
) -> tuple[Float[Tensor, "b h k"], Int[Tensor, "b h k"], Tensor]:
    """(probability of those who go on, who they are, who is kept) after the duels of neighbours."""
    first, second = p[..., ::2], p[..., 1::2]
    total = first + second
    one_out = total <= 1.0
    chance = torch.where(one_out, first / total.clamp_min(1e-300), (1.0 - second) / (2.0 - total).clamp_min(1e-300))
    wins = u < chance
    winner = torch.where(wins, entry[..., ::2], entry[..., 1::2])
    loser = torch.where(wins, entry[..., 1::2], entry[..., ::2])
    keep = keep.scatter(-1, winner, ~one_out)
    return torch.where(one_out, total, total - 1.0), torch.where(one_out, winner, loser), keep
