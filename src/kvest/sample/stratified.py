"""Stratified sampling: one entry out of every cell of the cumulated probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.random import Stream
from kvest.sample._base import Proportional, cumulated, proportional
from kvest.types import Draw


@dataclass(frozen=True)
class Stratified(Proportional):
    """pi_i = min(1, c x_i); one uniform point in each cell [n, n + 1), entry i is kept when one falls into
    [C_{i-1}, C_i), C the cumulated pi in the order of positions

    Cells are drawn independently, but for the entry that lies across a border, with a of its pi before and b behind it:
    where the cell before has drawn it, the point behind avoids b; where not, it falls into b with probability
    b / (1 - a). So no entry is drawn twice, exactly m entries are kept, and each with probability pi_i.
    Two entries inside one cell are never kept together: as for any design with one draw a cell, no estimate of its
    variance is unbiased; one that puts neighbouring cells together is too large on average.
    Source: Deville's systematic sampling, 1998, which is the ordered pivotal method: Chauvet 2012,
    doi:10.3150/11-BEJ380.
    """

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        inclusion = proportional(score, counts)
        full = inclusion >= 1.0
        sums, whole = cumulated(inclusion.masked_fill(full, 0.0))
        chosen, exists = _chosen(sums, whole, stream)
        hits = torch.zeros_like(positions).scatter_add_(-1, chosen, exists.long())
        keep = full | (hits > 0)
        return Draw(keep, inclusion, keep.long(), inclusion)


def _chosen(
    sums: Float[Tensor, "b h t"], whole: Float[Tensor, "b h 1"], stream: Stream
) -> tuple[Int[Tensor, "b h n"], Bool[Tensor, "b h n"]]:
    """(the entry drawn in each cell, whether there is such a cell)."""
    cells = int(whole.max())
    index = torch.arange(cells, device=sums.device).expand(*sums.shape[:2], cells)
    start = index.double()
    last = sums.shape[-1] - 1
    across = torch.searchsorted(sums, start).clamp_max(last)  # the entry that ends at the cell's start or behind it
    behind = torch.where(start > 0, (sums.gather(-1, across) - start).clamp(0.0, 1.0), 0.0)
    begin = torch.nn.functional.pad(sums, (1, 0)).gather(-1, across)
    before = torch.where(start > 0, (start - begin).clamp(0.0, 1.0), 0.0)
    again = (behind / (1.0 - before).clamp_min(1e-300)).clamp_max(1.0)

    u = stream.uniform(index)
    rest = ((u - again) / (1.0 - again).clamp_min(1e-300)).clamp(0.0, 1.0)

    def outside(share: Float[Tensor, "b h n"]) -> Int[Tensor, "b h n"]:
        """The entry at this share of what the cell holds besides the entry across its start."""
        point = torch.minimum(start + behind + share * (1.0 - behind), torch.nextafter(start + 1.0, start))
        return torch.searchsorted(sums, point, right=True).clamp_max(last)

    free = torch.where(u < again, across, outside(rest))  # if the entry across was not drawn in the cell before
    taken = outside(u)  # if it was
    follows = torch.nn.functional.pad(across[..., 1:], (0, 1), value=-1)  # the entry across the cell's end
    drawn = _scan(free == follows, taken == follows)
    drawn = torch.nn.functional.pad(drawn[..., :-1], (1, 0))
    return torch.where(drawn, taken, free), start < whole


def _scan(free: Bool[Tensor, "b h n"], taken: Bool[Tensor, "b h n"]) -> Bool[Tensor, "b h n"]:
    """The state after each step of s <- taken if s else free, from False: in log2(n) rounds, not n."""
    step = 1
    while step < free.shape[-1]:
        # what `step` steps earlier began is what the steps up to here do to where it ended
        near_free, near_taken = free[..., step:], taken[..., step:]
        far_free, far_taken = free[..., :-step], taken[..., :-step]
        free = torch.cat((free[..., :step], torch.where(far_free, near_taken, near_free)), dim=-1)
        taken = torch.cat((taken[..., :step], torch.where(far_taken, near_taken, near_free)), dim=-1)
        step *= 2
    return free
