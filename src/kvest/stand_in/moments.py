"""Moments: what is gone answers as one entry whose value is linear in the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.stand_in._base import StandIn, mean_query
from kvest.types import Draw, Kept, Made, Observation


@dataclass(frozen=True)
class Moments(StandIn):
    """f(q) = v_E + s C (q - mu),   Z(q) = n exp(s (q - mu).k_E),   merged by mass with what is kept

    a_i = exp(s mu.k_i + l_i) of entry i that is gone, n = sum a_i, k_E and v_E the means of keys and values under a_i,
    C = sum a_i (v_i - v_E)(k_i - k_E)^T / n. Output and log mass of the entries that are gone, to first order at mu:
    `at="zero"` has mu = 0, where a_i counts entries, `at="mean"` the mean of the last `rows` queries over the group.

    One made entry (k_E, log n - s mu.k_E, v_E - s C mu), and its slope s C beside it. What was made in an earlier round
    is expanded anew like any other entry, with its own slope: moments add up over rounds.

    Source: MomentKV, arXiv:2606.01563, which has mu = 0.
    Unlike the paper: any policy says what is gone; its rule, which lets go of what the moments say well, is none of it.
    """

    at: Literal["zero", "mean"] = "zero"
    rows: int = 64

    def __post_init__(self) -> None:
        if self.at not in ("zero", "mean"):
            raise ValueError(f"moments has at='zero' and at='mean', not {self.at!r}")
        if not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"moments needs a whole number rows >= 1, not {self.rows!r}")

    @property
    def queries(self) -> int:
        return self.rows if self.at == "mean" else 0

    @property
    def most(self) -> int:
        return 1

    def beside(self, key_width: int, value_width: int) -> int:
        return key_width * value_width

    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept:
        evicted = observation.valid & ~draw.keep
        counts = torch.minimum(room, evicted.sum(dim=-1))
        mean = mean_query(observation.recent(self.rows if self.at == "mean" else 0))
        return Kept(observation, log_weights, moments(observation, mean, evicted, counts))


def moments(
    observation: Observation, mean: Float[Tensor, "b h d"], evicted: Bool[Tensor, "b h t"], counts: Int[Tensor, "b h"]
) -> Made:
    """The moments at `mean` of what each head evicts, where it makes an entry (`counts` is 1); else those it had."""
    b, h, _, d = observation.keys.shape
    slopes = observation.slopes
    if slopes is None:
        slopes = observation.keys.new_zeros(b, h, observation.values.shape[3], d)
    columns = (observation.keys, observation.values, observation.log_weights, evicted, observation.made, slopes, mean)
    size = 1 if observation.keys.is_cpu else b * h
    chunks = zip(*(torch.split(x.flatten(0, 1), size) for x in columns), strict=True)
    parts = [_of_heads(observation.scale, *chunk) for chunk in chunks]
    keys, values, masses, new = (torch.cat(x).view(b, h, *x[0].shape[1:]) for x in zip(*parts, strict=True))
    stays = (observation.made & ~evicted).any(dim=-1)
    slopes = torch.where((counts > 0)[..., None, None], new, slopes * stays[..., None, None])
    return Made(keys, values, masses, counts, slopes)


def _of_heads(
    scale: float,
    keys: Float[Tensor, "k t d"],
    values: Float[Tensor, "k t e"],
    log_weights: Float[Tensor, "k t"],
    evicted: Bool[Tensor, "k t"],
    made: Bool[Tensor, "k t"],
    slopes: Float[Tensor, "k e d"],
    mean: Float[Tensor, "k d"],
) -> tuple[Float[Tensor, "k 1 d"], Float[Tensor, "k 1 e"], Float[Tensor, "k 1"], Float[Tensor, "k e d"]]:
    """(key, value, log weight, slope) of the one entry that stands for all that some heads evict."""
    dtype, mu = keys.dtype, mean[..., None]
    keys, values = (x.float().masked_fill(~evicted[..., None], 0.0) for x in (keys, values))
    before = slopes.float()
    values = values + (made & evicted)[..., None] * (before @ mu).transpose(1, 2)  # of the made entry at this query
    logits = (scale * (keys @ mu)[..., 0] + log_weights).masked_fill(~evicted, -torch.inf)
    share = logits.softmax(dim=-1).masked_fill(~evicted, 0.0)[:, None]
    key, value = share @ keys, share @ values
    slope = scale * ((values - value) * share.transpose(1, 2)).transpose(1, 2) @ (keys - key)
    slope = (slope + (share[:, 0] * made).sum(dim=-1)[:, None, None] * before).to(dtype)
    key = key.to(dtype)
    log_mass = logits.logsumexp(dim=-1, keepdim=True) - scale * (key.float() @ mu)[..., 0]
    value = value - (slope.float() @ mu).transpose(1, 2)
    return key, value.to(dtype), log_mass, slope
