"""One threshold: all heads and layers of a sequence are sampled at one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.sample import Design
from kvest.sample._base import candidates
from kvest.types import Observation, Proposal, Split


@dataclass(frozen=True)
class OneThreshold(Allocate):
    """counts_lh = sum_i pi_lhi,  pi = design.inclusion(x, c),  one c such that sum_lh counts_lh is the whole budget

    x sums to 1 over what each head may draw from. Minimising the summed variance over heads and layers under one
    budget leads to it: peaked heads keep few entries, flat heads many. With `with_replacement` c is one number of
    draws for the whole model; with `top_k` the heads' entries are ranked together. Counts are rounded by largest
    remainder, so that a row keeps its whole budget exactly. Source: ours.
    `raw=True`: x are the scores as they are, so that a head with larger ones keeps more. They must compare over heads,
    as shares of attention do. With `top_k` it is kvzip's ranking of all entries of the model, arXiv:2505.23416.
    """

    raw: bool = False

    whole_model = True

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        pairs = [candidates(p, o.valid) for p, o in zip(proposals, observations, strict=True)]
        scores = [score for score, _ in pairs]
        split = observations[0].split
        certain = together([kept.sum(dim=-1) for _, kept in pairs], split)
        lengths = together([o.lengths for o in observations], split)
        budget = observations[0].budget * lengths.shape[1]
        free = torch.minimum(budget, lengths.sum(dim=1)) - certain.sum(dim=1)
        compared = _raw(scores, proposals, pairs, split) if self.raw else scores
        wanted = expected_counts(compared, free, design, split)
        counts = certain + largest_remainder(wanted, free, lengths - certain)
        return own(counts, scores, split)


def _raw(
    scores: Sequence[Float[Tensor, "b _ _"]],
    proposals: Sequence[Proposal],
    pairs: Sequence[tuple[Tensor, Tensor]],
    split: Split,
) -> list[Float[Tensor, "b _ _"]]:
    """Normalised scores times what each head's sum is of the largest head's."""
    sums = [(p.score.double() * (x > 0)).sum(dim=-1) for p, (x, _) in zip(proposals, pairs, strict=True)]
    most = together(sums, split).amax(dim=1, keepdim=True).clamp_min(1e-300)
    return [x * (mine / most.to(x.device))[..., None] for x, mine in zip(scores, sums, strict=True)]


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
    total: Int[Tensor, "b"],
    design: Design,
    split: Split,
) -> Float[Tensor, "b lh"]:
    """Expected kept entries per head at the common rate where they sum to `total` (ties are shared evenly)

    Scores stay where they are, on their device and in their process: only sums over each head's entries travel.
    """

    def at(rate: Float[Tensor, "b"]) -> Float[Tensor, "b lh"]:
        return together([design.inclusion(x, rate.to(x.device)[:, None, None]).sum(dim=-1) for x in scores], split)

    # Bisection on log(rate). Scores sum to 1 per head and are floored at 1e-30 of the largest, so that the rate lies
    # between 1e-3 (everything below one entry) and 1e45; 80 halvings reach the spacing of float64.
    low = torch.full_like(total, -7.0, dtype=torch.float64)
    high = torch.full_like(low, 104.0)
    for _ in range(80):
        middle = (low + high) / 2
        enough = at(middle.exp()).sum(dim=1) >= total
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    below, above = at(low.exp()), at(high.exp())
    gap = above.sum(dim=1) - below.sum(dim=1)
    share = ((total - below.sum(dim=1)) / gap.clamp_min(1e-300)).clamp(0.0, 1.0)
    return below + share[:, None] * (above - below)


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
