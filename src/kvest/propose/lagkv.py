"""LagKV: entries that stick out from the range of those that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.propose._base import Propose, at_least, ordinals, propose_score, tokens
from kvest.types import Observation, Proposal

SINKS = 4
"""What kvpress leaves out in front, whatever the policy."""


@dataclass(frozen=True)
class LagKV(Propose):
    """score_i = rank_i(a(k) + a(v)) / (lag + 1),  a(x)_i = softmax_i(std_c((x_ic - min_c) / (max_c - min_c)))

    A head's entries after the policy's sinks are cut into lags of `lag`. min_c and max_c are a channel's extremes over
    the next lag; softmax and rank (1 to `lag`, equal entries share the lower) run over i's own. What has no next lag
    scores 1, more than any rank: the sinks, the newest full lag and what comes after it.

    Source: LagKV, arXiv:2504.04704, which keeps the first ranks of every lag.
    Unlike the paper: entries without a next lag are not certain to stay, because they may be more than the budget; a
    channel that is constant over the next lag counts 0; in later rounds lags are cut from the entries held.
    `peer=True`: as kvpress 0.5.5. Lags start after 4 entries, ranks are 0 to `lag` - 1 over `lag`, and what is shorter
    than two lags is scored by recency.
    """

    lag: int = 128
    peer: bool = False

    def __post_init__(self) -> None:
        at_least(1, lag=self.lag)

    def __call__(self, observation: Observation) -> Proposal:
        sinks = torch.full_like(observation.positions[..., :1], SINKS)
        if not self.peer:
            sinks = (tokens(observation) & (observation.positions < observation.sinks)).sum(dim=-1, keepdim=True)
        place = ordinals(observation) - sinks
        first = -place[..., :1]
        count = place.shape[-1] - first
        score = torch.ones_like(place, dtype=torch.float32)
        lags = observation.keys.shape[2] // self.lag
        if lags >= 2:
            slots = (first + torch.arange(lags * self.lag, device=first.device)).clamp(0, place.shape[-1] - 1)
            ranks = self._ranks(_spread(observation.keys, slots, lags) + _spread(observation.values, slots, lags))
            followed = (place >= 0) & ((place // self.lag + 2) * self.lag <= count)
            ranks = ranks.flatten(2).gather(2, place.clamp(0, ranks[0, 0].numel() - 1))
            score = torch.where(followed, ranks, score)
        if self.peer:
            score = torch.where((count < 2 * self.lag) & (place >= 0), place / count.clamp_min(1), score)
        return propose_score(observation, score)

    def _ranks(self, spread: Float[Tensor, "b h n i"]) -> Float[Tensor, "b h n i"]:
        """How many of the same lag lie below, as a share."""
        if self.peer:
            return spread.argsort(dim=-1).argsort(dim=-1) / self.lag
        below = torch.searchsorted(spread.sort(dim=-1).values, spread)
        return (below + 1) / (self.lag + 1)


def _spread(x: Float[Tensor, "b h t d"], slots: Int[Tensor, "b h r"], lags: int) -> Float[Tensor, "b h n i"]:
    """Softmax over each lag but the last of the spread over channels, in the range of the next lag."""
    b, h, _, d = x.shape
    cut = x.float().gather(2, slots[..., None].expand(*slots.shape, d)).view(b, h, lags, -1, d)
    least, most = cut[:, :, 1:].aminmax(dim=3, keepdim=True)
    span = most - least
    normal = torch.where(span > 0, (cut[:, :, :-1] - least) / span, 0.0)
    return normal.std(dim=-1, correction=min(1, d - 1)).softmax(dim=-1)
