"""CapKV, chosen one by one: what an entry adds to the capacity of those already chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.propose._base import Propose, propose_score, tokens
from kvest.propose.capkv import CapKV
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class CapKVGreedy(Propose):
    """score_i = log(1 + w_i v_i^T A_S^-1 v_i),  A_S = I + sum_{i in S} w_i v_i v_i^T

    By how much C(S) = log det A_S grows with entry i, S being what was chosen before it: greedily, the entry of the
    largest growth first, until S is the budget. For the rest, S is all that was chosen. Growth only falls as S grows,
    so `top_k` keeps exactly the chosen ones. `capkv` ranks by what C loses without i instead, and so drops both of two
    equal entries. w_i is that of `capkv`, the mean over the query heads of a group; `form`, `tau` and `ahead` are its.
    Sinks, window and what the form leaves out are in the cache anyway: they score as much as the highest, and S begins
    with sinks and window.

    Cost: one step for each entry of the budget, which reads all values of the layer once, in float64; heads and rows
    go together. A quarter of 4,096 entries took 3 s a layer (4 heads of width 64, one core); it grows with t^2.
    Source: the objective of Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective; greedy
    selection for it ours, within 1 - 1/e of the best S by submodularity (Nemhauser, Wolsey and Fisher 1978).
    """

    form: Literal["authors", "paper"] = "authors"
    tau: float = 5.0
    ahead: int = 512
    exchangeable = False

    def __post_init__(self) -> None:
        self._capkv()  # which checks the knobs

    def _capkv(self) -> CapKV:
        return CapKV(self.form, self.tau, self.ahead)

    @property
    def queries(self) -> int | None:
        return self._capkv().queries

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]  # depends on the form
        return self._capkv().needs_rotation

    def __call__(self, observation: Observation) -> Proposal:
        log_w, counted = self._capkv().log_weights(observation)
        counted = counted & ~observation.made  # which no round keeps
        log_w = log_w.double().masked_fill(~counted[:, :, None], -torch.inf)
        least = torch.finfo(torch.float32).min
        if self.form == "authors":
            log_w = log_w - log_w.amax(dim=-1, keepdim=True).clamp_min(least)  # an empty head: finite
        log_w = log_w.logsumexp(dim=2) - math.log(log_w.shape[2])
        largest = log_w.amax(dim=-1, keepdim=True).clamp_min(least)
        weights = (log_w - largest).exp()
        ridge = (-largest).clamp(-600.0, 600.0).exp()  # their common factor, moved to the identity
        begin, apart = observation.protected & counted, tokens(observation) & (observation.protected | ~counted)
        room = observation.budget[:, None] - apart.sum(dim=-1)
        values = observation.values.double().masked_fill(~counted[..., None], 0.0)
        score = _chosen(weights, values, ridge[..., None], begin, counted & ~begin, room)
        highest = score.amax(dim=-1, keepdim=True)
        return propose_score(observation, torch.where(apart, torch.where(highest > 0, highest, 1.0), score))


def _chosen(
    weights: Float[Tensor, "b h t"],
    values: Float[Tensor, "b h t e"],
    ridge: Float[Tensor, "b h 1 1"],
    begin: Bool[Tensor, "b h t"],
    free: Bool[Tensor, "b h t"],
    room: Int[Tensor, "b h"],
) -> Float[Tensor, "b h t"]:
    """log(1 + gain) of the free entries when they were chosen, `room` of them; of the rest in the end

    A_S^-1 and all gains follow each choice by one rank-one update (Sherman and Morrison), in float64.
    """
    inverse, gains = _gains(weights, values, ridge, begin)
    score, worst = torch.zeros_like(gains), torch.full_like(gains[..., :1], torch.inf)
    room = torch.minimum(room, free.sum(dim=-1))[..., None]
    for step in range(int(room.amax())):
        gain, best = gains.masked_fill(~free, -1.0).max(dim=-1, keepdim=True)
        gain, chooses = gain.clamp_min(0.0), step < room
        worst = torch.where(chooses, torch.minimum(worst, gain), worst)  # it never grows, but for rounding
        score = torch.where(chooses, score.scatter(2, best, worst), score)
        free = free & ~torch.zeros_like(free).scatter_(2, best, chooses)
        value = values.gather(2, best[..., None].expand(*best.shape, values.shape[-1]))[:, :, 0, :, None]
        size = (weights.gather(2, best) / (1.0 + gain)).sqrt() * chooses
        across = inverse @ value * size[..., None]
        inverse = inverse - across @ across.transpose(2, 3)
        gains = gains - weights * (values @ across)[..., 0].square()
    rest = torch.minimum(gains.clamp_min(0.0), worst * (1 - 1e-6))  # below all that were chosen
    return torch.where(free, rest, score).log1p()


def _gains(
    weights: Float[Tensor, "b h t"],
    values: Float[Tensor, "b h t e"],
    ridge: Float[Tensor, "b h 1 1"],
    begin: Bool[Tensor, "b h t"],
) -> tuple[Float[Tensor, "b h e e"], Float[Tensor, "b h t"]]:
    """A_S^-1 and w_i v_i^T A_S^-1 v_i of the entries that S begins with."""
    eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    floor = 1e-12 * (weights * values.square().sum(dim=-1)).sum(dim=-1)[..., None, None]  # of the trace, as in capkv
    gram = (values * (weights * begin)[..., None]).transpose(2, 3) @ values
    factor = torch.linalg.cholesky_ex(gram + torch.maximum(ridge, floor) * eye).L  # fails for NaN only
    inverse = torch.cholesky_inverse(factor)
    return inverse, weights * ((values @ inverse) * values).sum(dim=-1)
