"""One threshold: all heads and layers of a sequence are sampled at one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.allocate._compete import expected_counts, largest_remainder, own, together
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
        wanted = expected_counts(compared, [o.positions for o in observations], free, design, split)
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
