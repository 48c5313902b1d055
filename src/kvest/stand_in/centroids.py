"""Centroids: a few made entries in the place of all that is gone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.observe import BLOCK_ELEMENTS
from kvest.stand_in._base import StandIn, mean_query
from kvest.types import Draw, Kept, Made, Observation

ITERATIONS = 3
"""Of Lloyd's algorithm: later ones move few entries, and each costs as much as scoring by `count` queries."""


@dataclass(frozen=True)
class Centroids(StandIn):
    """k_c, v_c = sum_{i in c} a_i (k_i, v_i) / sum_{i in c} a_i,   a_i = share exp(s mu.k_i + l_i)
    l_c = log sum_{i in c} a_i - s mu.k_c

    `count` clusters of each head's evicted keys; mu is the mean of the last `rows` queries over the group, s the scale.
    At the query mu a centroid has the mass of its cluster, at any other one no more (Jensen). Clusters are Lloyd's
    (k-means), where an entry counts share exp(l) times. The made entries count towards the budget.

    Of what is gone the centroids stand for `share`, the sample for the rest: a kept entry of this round's weight w gets
    1 + (1 - share) (w - 1). With inclusion weights the expected numerator and denominator at mu are those of the full
    cache. In a head without room for centroids the sample stands for all, in one without a sample the centroids do.
    What was made in an earlier round joins the clusters with all of its mass: its share is 1.

    Source: ours.
    """

    count: int = 8
    share: float = 1.0
    rows: int = 64

    def __post_init__(self) -> None:
        for name in ("count", "rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"centroids needs a whole number {name} >= 1, not {value!r}")
        if not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise ValueError(f"centroids needs 0 < share <= 1, not {self.share!r}: without a share leave centroids out")

    @property
    def shares(self) -> bool:  # type: ignore[override]  # depends on the share
        return self.share < 1

    @property
    def queries(self) -> int:
        return self.rows

    @property
    def most(self) -> int:
        return self.count

    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept:
        evicted = observation.valid & ~draw.keep
        counts = torch.minimum(room, evicted.sum(dim=-1))
        drawn = ((draw.inclusion > 0) & (draw.inclusion < 1)).any(dim=-1)
        share = torch.full_like(room, self.share, dtype=torch.float64).masked_fill(~drawn, 1.0)
        share = share.masked_fill(room == 0, 0.0)[..., None]
        log_weights = torch.log1p((1.0 - share) * torch.expm1(log_weights.double())).float()
        mass = observation.log_weights + torch.where(observation.made, 0.0, share.log()).float()
        made = centroids(observation, mass, mean_query(observation.recent(self.rows)), evicted, counts)
        return Kept(observation, log_weights, made)


def centroids(
    observation: Observation,
    log_weights: Float[Tensor, "b h t"],
    mean: Float[Tensor, "b h d"],
    evicted: Bool[Tensor, "b h t"],
    counts: Int[Tensor, "b h"],
) -> Made | None:
    """`counts` centroids of each head's evicted entries; None where no head makes any

    Memory: O(t n) for a few heads at a time.
    """
    b, h, t, _ = observation.keys.shape
    n = int(counts.max())
    if n == 0:
        return None
    size = max(1, BLOCK_ELEMENTS // (t * n)) if observation.keys.is_cpu else b * h
    columns = (observation.keys, observation.values, log_weights, mean * observation.scale, evicted, counts)
    chunks = zip(*(torch.split(x.flatten(0, 1), size) for x in columns), strict=True)
    parts = [_of_heads(n, *chunk) for chunk in chunks]
    keys, values, masses = (torch.cat(x).view(b, h, n, *x[0].shape[2:]) for x in zip(*parts, strict=True))
    return Made(keys, values, masses, counts)


def _of_heads(
    n: int,
    keys: Float[Tensor, "k t d"],
    values: Float[Tensor, "k t e"],
    log_weights: Float[Tensor, "k t"],
    mean: Float[Tensor, "k d"],
    evicted: Bool[Tensor, "k t"],
    counts: Int[Tensor, "k"],
) -> tuple[Float[Tensor, "k n d"], Float[Tensor, "k n e"], Float[Tensor, "k n"]]:
    """(keys, values, log weights) of some heads' centroids; `mean` is scaled."""
    exact_keys, exact_values = (x.float().masked_fill(~evicted[..., None], 0.0) for x in (keys, values))
    log_weights = log_weights.masked_fill(~evicted, -torch.inf)
    largest = log_weights.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    labels = clusters(exact_keys, (log_weights - largest).exp(), evicted, counts, n)
    logits = (exact_keys @ mean[..., None])[..., 0] + log_weights
    top = logits.new_full((len(keys), n), -torch.inf).scatter_reduce_(1, labels, logits, "amax")
    mass = (logits - top.gather(1, labels)).exp().masked_fill(~evicted, 0.0)  # the largest of each cluster is 1
    member = _members(labels, mass, n)
    total = member.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    made_keys = (member @ exact_keys / total).to(keys.dtype)
    made_values = (member @ exact_values / total).to(values.dtype)
    at_mean = (made_keys.float() @ mean[..., None])[..., 0]  # of the rounded key: the mass at mu is exact
    return made_keys, made_values, top + total[..., 0].log() - at_mean


def clusters(
    keys: Float[Tensor, "k t d"],
    weights: Float[Tensor, "k t"],
    there: Bool[Tensor, "k t"],
    counts: Int[Tensor, "k"],
    n: int,
) -> Int[Tensor, "k t"]:
    """Lloyd's algorithm: the cluster, below `counts`, of each entry that is there. None of them is empty.

    The start is spread evenly over the entries in their order: a stretch of the context each.
    """
    slots = torch.arange(n, device=keys.device)
    rank = there.cumsum(dim=1)  # from 1
    total = rank[:, -1:]
    first = (2 * slots + 1) * total // (2 * counts[:, None].clamp_min(1))
    where = torch.searchsorted(rank, first + 1).clamp_max(keys.shape[1] - 1)
    centres = keys.gather(1, where[..., None].expand(-1, -1, keys.shape[2]))
    labels = _nearest(keys, centres, there, counts)
    for _ in range(ITERATIONS):
        member = _members(labels, weights, n)
        mass = member.sum(dim=-1, keepdim=True)
        centres = torch.where(mass > 0, member @ keys / mass.clamp_min(torch.finfo(torch.float32).tiny), centres)
        labels = _nearest(keys, centres, there, counts)
    return labels


def _members(labels: Int[Tensor, "k t"], weights: Float[Tensor, "k t"], n: int) -> Float[Tensor, "k n t"]:
    """The weight of each entry in its own cluster, 0 in all others."""
    slots = torch.arange(n, device=labels.device)[:, None]
    return (labels[:, None] == slots) * weights[:, None]


def _nearest(
    keys: Float[Tensor, "k t d"], centres: Float[Tensor, "k n d"], there: Bool[Tensor, "k t"], counts: Int[Tensor, "k"]
) -> Int[Tensor, "k t"]:
    """The nearest of each head's first `counts` centres; one that is nearest to none gets the farthest entry."""
    n = centres.shape[1]
    used = torch.arange(n, device=keys.device) < counts[:, None]
    half = centres.square().sum(dim=-1) / 2
    closeness = torch.baddbmm(-half[:, None], keys, centres.transpose(1, 2))  # k.c - norm(c)^2 / 2
    closest, labels = closeness.masked_fill_(~used[:, None], -torch.inf).max(dim=-1)
    empty = used & (_members(labels, there.float(), n).sum(dim=-1) == 0)
    if not bool(empty.any()):
        return labels
    distance = keys.square().sum(dim=-1) / 2 - closest
    slot = torch.arange(keys.shape[1], device=keys.device).expand_as(labels)
    first = torch.full_like(labels[:, :n], keys.shape[1]).scatter_reduce_(
        1, labels, slot.masked_fill(~there, keys.shape[1]), "amin"
    )
    distance = distance.masked_fill(~there | (slot == first.gather(1, labels)), -torch.inf)  # none is emptied instead
    farthest = distance.sort(dim=-1, descending=True, stable=True).indices[:, :n]
    order = empty.sort(dim=-1, descending=True, stable=True).indices
    moved = torch.arange(n, device=keys.device) < empty.sum(dim=-1, keepdim=True)
    return labels.scatter(1, farthest, torch.where(moved, order, labels.gather(1, farthest)))
