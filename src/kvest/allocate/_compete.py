"""What heads do that compete: one sampling rate for all of them, and whole numbers that sum to the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvest.sample import Design
from kvest.sample._base import candidates
from kvest.types import Observation, Proposal, Split

LEAST_RATE = 1e-12
"""Of a head, relative to the largest: what is less differs in nothing but the order of entries nobody looks at."""


def together(layers: Sequence[Shaped[Tensor, "b _"]], split: Split) -> Shaped[Tensor, "b lh"]:
    """One number for each head of the model, layer after layer, from those of all layers and all processes

    On the first layer's device. Every process gets the same numbers in the order of one process that holds all heads,
    so that all of them allocate alike.
    """
    mine = torch.cat([x.to(layers[0].device) for x in layers], dim=1)
    parts = [torch.split(part, [x.shape[1] for x in layers], dim=1) for part in split.gather(mine)]
    return torch.cat([heads for layer in zip(*parts, strict=True) for heads in layer], dim=1)


def own(
    counts: Int[Tensor, "b lh"], scores: Sequence[Float[Tensor, "b _ _"]], split: Split
) -> list[Int[Tensor, "b _"]]:
    """The inverse of `together`: this process's heads of each layer, on the layer's device."""
    heads = [x.shape[1] for x in scores]
    processes = counts.shape[1] // sum(heads)
    layers = torch.split(counts, [h * processes for h in heads], dim=1)
    return [
        layer[:, h * split.rank : h * (split.rank + 1)].to(x.device)
        for layer, h, x in zip(layers, heads, scores, strict=True)
    ]


def expected_counts(
    scores: Sequence[Float[Tensor, "b _ _"]],  # layers that were evicted before may differ in t
    positions: Sequence[Int[Tensor, "b _ _"]],
    total: Int[Tensor, "b"],
    design: Design,
    split: Split,
    least: Int[Tensor, "b lh"] | None = None,
    rates: Sequence[Float[Tensor, "_ 1"]] | None = None,
) -> Float[Tensor, "b lh"]:
    """Expected kept entries per head at the common rate where they sum to `total` (ties are shared evenly)

    No head gets fewer than `least`; each is sampled at its own multiple of the rate, one of `rates` (at most 1, at
    least `LEAST_RATE`; None: 1). Scores stay where they are, on their device and in their process: only sums over each
    head's entries travel.
    """

    def at(rate: Float[Tensor, "b"]) -> Float[Tensor, "b lh"]:
        common = [rate.to(x.device)[:, None, None] for x in scores]
        each = common if rates is None else [c * r for c, r in zip(common, rates, strict=True)]
        kept = [design.inclusion(x, r, where) for x, r, where in zip(scores, each, positions, strict=True)]
        counts = together([pi.sum(dim=-1) for pi in kept], split)
        return counts if least is None else torch.maximum(counts, least)

    # Bisection on log(rate). Scores sum to 1 per head and are floored at 1e-30 of the largest, so that the rate lies
    # between 1e-3 (everything below one entry) and 1e45, divided by the least of `rates`; 80 halvings reach the spacing
    # of float64.
    low = torch.full_like(total, -7.0, dtype=torch.float64)
    high = torch.full_like(low, 104.0 if rates is None else 104.0 - math.log(LEAST_RATE))
    for _ in range(80):
        middle = (low + high) / 2
        enough = at(middle.exp()).sum(dim=1) >= total
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    below, above = at(low.exp()), at(high.exp())
    gap = above.sum(dim=1) - below.sum(dim=1)
    share = ((total - below.sum(dim=1)) / gap.clamp_min(1e-300)).clamp(0.0, 1.0)
    return below + share[:, None] * (above - below)


def of_layer(proposal: Proposal, observation: Observation) -> tuple[Float[Tensor, "b h t"], Int[Tensor, "b h"]]:
    """(scores of what may be drawn as they are, summing to 1 over all heads of the layer; certain entries)

    A head's share of the layer counts as no less than 1e-9 of the largest, so that it can be filled up.
    """
    score, certain = candidates(proposal, observation.valid)
    free = score > 0
    mass = (proposal.score.double() * free).sum(dim=-1)
    heads = together([mass], observation.split)
    largest = heads.amax(dim=1, keepdim=True)
    floor = torch.where(largest > 0, 1e-9 * largest, torch.ones_like(largest))
    total = torch.maximum(heads, floor).sum(dim=1, keepdim=True)
    return score * (torch.maximum(mass, floor) / total)[..., None], certain.sum(dim=-1)


def compete(
    proposal: Proposal, observation: Observation, design: Design, total: Int[Tensor, "b"], least: Int[Tensor, "b n"]
) -> Int[Tensor, "b n"]:
    """Counts of all heads of a layer that sum to `total`, at least `least`, by the scores as they are."""
    score, sure = of_layer(proposal, observation)
    split = observation.split
    certain, lengths = together([sure], split), together([observation.lengths], split)
    free = total - certain.sum(dim=1)
    more = (least - certain).clamp_min(0)
    wanted = expected_counts([score], [observation.positions], free, design, split, more)
    return certain + largest_remainder(wanted, free, lengths - certain)


def largest_remainder(
    wanted: Float[Tensor, "b n"], total: Int[Tensor, "b"], most: Int[Tensor, "b n"]
) -> Int[Tensor, "b n"]:
    """Whole numbers close to `wanted`, at most `most`, that sum to `total`."""
    counts = torch.minimum((wanted + 1e-9).floor().long(), most)
    missing = (total - counts.sum(dim=1)).clamp_min(0)
    # Heads in which no entry is certain want exactly the same: head order decides then, and not the last bit.
    remainder = ((wanted - counts) * 2**20).round().masked_fill(counts >= most, -torch.inf)
    order = remainder.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(wanted.shape[1], device=wanted.device)
    extra = torch.zeros_like(counts).scatter_(1, order, (rank < missing[:, None]).long())
    return torch.minimum(counts + extra, most)
