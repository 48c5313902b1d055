"""Merging: what is gone is folded into the kept entry with the nearest key."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from kvest.observe import BLOCK_ELEMENTS, slots_of
from kvest.stand_in._base import StandIn
from kvest.types import Draw, Kept, Observation


@dataclass(frozen=True)
class Merge(StandIn):
    """j(i) = argmax_j cos(k_i, k_j) over kept j,   u_i = cos(k_i, k_j(i)),   M_j = {i gone: j(i) = j, u_i >= threshold}
    k_j, v_j = (e w_j (k_j, v_j) + sum_{i in M_j} exp(u_i) w_i (k_i, v_i)) / (e w_j + sum_{i in M_j} exp(u_i) w_i)

    w_i is the weight of an entry that was kept before (1 for exact ones), e = exp(1) the similarity of k_j to itself.
    `threshold=None` is each head's mean of u_i: what is less alike than the average is forgotten. `keys=False` merges
    values only, as CaM does. Log weights stay as they are: a merged entry has the mass of one.

    Source: D2O, arXiv:2406.13035.
    Unlike the paper: the threshold is the mean of this round, without an average over earlier ones; any policy says
    what is gone, and how much each layer keeps.
    """

    threshold: float | None = None
    keys: bool = True

    def __post_init__(self) -> None:
        if self.threshold is not None and not -1 <= self.threshold <= 1:
            raise ValueError(f"merge needs -1 <= threshold <= 1, or None for the mean, not {self.threshold!r}")

    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept:
        b, h, t, _ = observation.keys.shape
        evicted = observation.valid & ~draw.keep
        columns = (observation.keys, observation.values, observation.log_weights, draw.keep, evicted)
        chunks = zip(*(torch.split(x.flatten(0, 1), 1 if x.is_cpu else b * h) for x in columns), strict=True)
        parts = [_merged(self.threshold, *chunk) for chunk in chunks]
        keys, values = (torch.cat(x).view(b, h, t, -1) for x in zip(*parts, strict=True))
        changed = replace(observation, values=values, keys=keys if self.keys else observation.keys)
        return Kept(changed, log_weights)


def _merged(
    threshold: float | None,
    keys: Float[Tensor, "k t d"],
    values: Float[Tensor, "k t e"],
    log_weights: Float[Tensor, "k t"],
    keep: Bool[Tensor, "k t"],
    evicted: Bool[Tensor, "k t"],
) -> tuple[Float[Tensor, "k t d"], Float[Tensor, "k t e"]]:
    """Keys and values of some heads, the kept ones merged. Memory: `BLOCK_ELEMENTS` similarities at once, for each."""
    kept, gone = slots_of(keep), slots_of(evicted)
    if kept.shape[1] == 0 or gone.shape[1] == 0:
        return keys, values
    exists = keep.gather(1, kept)
    similarity, nearest = _nearest(keys, kept, gone, exists)
    if threshold is None:
        there = evicted.gather(1, gone) & exists.any(dim=1, keepdim=True)
        mean = similarity.masked_fill(~there, 0.0).sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp_min(
            1
        )
    else:
        mean = torch.full_like(similarity[:, :1], threshold)
    weights = (log_weights - log_weights.amax(dim=1, keepdim=True)).exp()
    weight = (similarity.exp() * weights.gather(1, gone)).masked_fill(similarity < mean, 0.0)
    weight = weight.masked_fill(~evicted.gather(1, gone), 0.0)
    both = torch.cat([keys, values], dim=2)
    own = math.e * weights.gather(1, kept)
    total, merged = own.clone(), own[..., None] * _rows(both, kept).float()
    heads = torch.arange(len(keys), device=keys.device)[:, None].expand_as(nearest)
    total.index_put_((heads, nearest), weight, accumulate=True)  # in a fixed order, unlike index_add_
    merged.index_put_((heads, nearest), weight[..., None] * _rows(both, gone).float(), accumulate=True)
    merged = (merged / total[..., None]).to(both.dtype)
    merged = torch.where((exists & (total > own))[..., None], merged, _rows(both, kept))
    both = both.scatter(1, kept[..., None].expand_as(merged), merged)
    return both[..., : keys.shape[2]], both[..., keys.shape[2] :]


def _rows(x: Float[Tensor, "k t c"], slots: Int[Tensor, "k n"]) -> Float[Tensor, "k n c"]:
    return x.gather(1, slots[..., None].expand(-1, -1, x.shape[2]))


def _nearest(
    keys: Float[Tensor, "k t d"], kept: Int[Tensor, "k s"], gone: Int[Tensor, "k n"], exists: Bool[Tensor, "k s"]
) -> tuple[Float[Tensor, "k n"], Int[Tensor, "k n"]]:
    """(cosine, place among `kept`) of the kept key that is most alike each evicted one."""
    units = normalize(_rows(keys, kept).float(), dim=-1).transpose(1, 2)
    found, ragged = [], not bool(exists.all())
    for some in torch.split(gone, max(1, BLOCK_ELEMENTS // kept.shape[1]), dim=1):
        cosines = normalize(_rows(keys, some).float(), dim=-1) @ units
        if ragged:
            cosines.masked_fill_(~exists[:, None], -torch.inf)
        found.append(cosines.max(dim=-1))
    return torch.cat([x.values for x in found], dim=1), torch.cat([x.indices for x in found], dim=1)
