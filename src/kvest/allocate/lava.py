"""LAVa: layers of scattered scores get more than layers of concentrated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.allocate._compete import compete, largest_remainder, of_layer, own, together
from kvest.sample import Design
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class LavaAllocation(Allocate):
    """counts_l proportional to e_l = -sum_hi y_hi log y_hi / log n,  y: the layer's n scores, normalised to sum to 1

    What is certain comes on top, and no layer gets more than it holds: others share what it leaves. Within a layer the
    heads' scores compete as they are, as in `adaptive(floor=0)`. Counts sum to the whole budget.
    Source: LAVa, arXiv:2509.09754.
    Unlike the paper: any score and any design; the entries that always stay take no part in the entropy.
    """

    whole_model = True

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        split, pairs = observations[0].split, list(zip(proposals, observations, strict=True))
        parts = [_summed(p, o) for p, o in pairs]
        processes = len(split.gather(observations[0].budget))
        heads = [o.lengths.shape[1] * processes for o in observations]
        layer = torch.tensor([n for n, h in enumerate(heads) for _ in range(h)], device=observations[0].budget.device)

        def per_layer(x: Sequence[Tensor]) -> Tensor:
            every = together(x, split)
            return every.new_zeros(len(every), len(pairs)).index_add_(1, layer, every)

        certain, lengths, drawn, surprise = (per_layer(x) for x in zip(*parts, strict=True))
        entropy = surprise / drawn.clamp_min(2).double().log()
        total = torch.minimum(observations[0].budget * len(layer), lengths.sum(dim=1))
        free = total - certain.sum(dim=1)
        wanted = shares(entropy, free, lengths - certain)
        counts = certain + largest_remainder(wanted, free, lengths - certain)
        out = []
        for n, (p, o) in enumerate(pairs):
            none = torch.zeros(len(counts), heads[n], dtype=torch.int64, device=o.lengths.device)
            mine = compete(p, o, design, counts[:, n].to(o.lengths.device), none)
            out += own(mine, [p.score], split)
        return out


def _summed(
    proposal: Proposal, observation: Observation
) -> tuple[Int[Tensor, "b h"], Int[Tensor, "b h"], Int[Tensor, "b h"], Float[Tensor, "b h"]]:
    """Of each head: certain entries, entries, entries that may be drawn, -sum y log y."""
    score, certain = of_layer(proposal, observation)
    surprise = torch.special.entr(score).sum(dim=-1)
    return certain, observation.lengths, (score > 0).sum(dim=-1), surprise


def shares(weights: Float[Tensor, "b l"], total: Int[Tensor, "b"], most: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """min(most, c weights) with c such that they sum to `total`; layers of weight 0 are the last to be filled."""
    weights = weights.clamp_min(1e-9)
    filled = (most / weights).sort(dim=1)  # the c at which each layer is full, in ascending order
    weight, room = weights.gather(1, filled.indices), most.double().gather(1, filled.indices)
    before, rest = room.cumsum(1) - room, weight.flip(1).cumsum(1).flip(1)
    rate = (total[:, None] - before) / rest  # if the layers in front are full, and no other
    enough = (rate * weight <= room * (1.0 + 1e-12)).long().argmax(dim=1, keepdim=True)  # the first that is not
    return torch.minimum(rate.gather(1, enough) * weights, most.double())
