"""CapKV: what an entry adds to the information capacity of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from kvest.propose._base import Propose, at_least, last, propose_score, rotation_of
from kvest.types import Observation, Proposal

LEFT_OUT = 4
"""Positions that the authors' code leaves out: attention sinks, unlike anything else."""


@dataclass(frozen=True)
class CapKV(Propose):
    """score_i = w_i v_i^T A^-1 v_i,  A = I + sum_i w_i v_i v_i^T,  w_i = exp(tau <k_i, mu>)

    The leverage of entry i in C(S) = log det(I + sum_{i in S} w_i v_i v_i^T): without i alone, C falls by
    -log(1 - score_i). mu is the mean query. Averaged over the query heads of a group.

    `form="authors"`: what the authors' code does. Keys and mu have unit length, mu is the mean query before its
    rotation, rotated by the mean rotation of the next `ahead` positions, the largest log weight is subtracted before
    exp, and w_i + 1e-6 stands for w_i in A. The first 4 positions, and their queries, are left out of all of it, and
    score as much as the highest of the others.
    `form="paper"`: the formula as printed, with the mean rotated query. The weights' common factor exp(max) is
    moved to the identity (exactly, down to 1e-12 of A's trace), so that nothing overflows; where all leverages fall
    below 1e-20 they are given relative to the largest.

    Source: Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective. An entry that was kept before
    counts by its weight.
    Unlike the paper: `authors` is the default, the form behind the published results.
    """

    form: Literal["authors", "paper"] = "authors"
    tau: float = 5.0
    ahead: int = 512

    def __post_init__(self) -> None:
        if self.form not in ("authors", "paper"):
            raise ValueError(f"capkv has form='authors' and form='paper', not {self.form!r}")
        at_least(1, ahead=self.ahead)

    @property
    def queries(self) -> int | None:
        return None

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]  # depends on the form
        return self.form == "authors"

    def __call__(self, observation: Observation) -> Proposal:
        log_w, counted = self.log_weights(observation)
        largest = log_w.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(log_w.dtype).min)  # an empty head: finite
        weights = (log_w - largest).exp()
        if self.form == "authors":
            leverage = _leverage((weights + 1e-6) * counted[:, :, None], observation.values, torch.ones_like(largest))
            score = (weights * leverage).mean(dim=2)
            highest = score.amax(dim=-1, keepdim=True)
            return propose_score(observation, torch.where(counted, score, torch.where(highest > 0, highest, 1.0)))
        ridge = (-largest.double()).clamp(-600.0, 600.0).exp()  # may be tiny: in float32 A would not stay positive
        score = (weights * _leverage(weights, observation.values, ridge)).mean(dim=2)
        highest = score.amax(dim=-1, keepdim=True)  # of an empty head (huge ridge) even float32 sees only zeros
        return propose_score(observation, torch.where(highest < 1e-20, score / highest.clamp_min(1e-300), score))

    def log_weights(self, observation: Observation) -> tuple[Float[Tensor, "b h g t"], Bool[Tensor, "b h t"]]:
        """log w_i of each query head, -inf where an entry is missing or left out; and which ones are not."""
        newest = last(observation, observation.queries.shape[3])
        keys, counted = newest.keys.float(), newest.valid
        if self.form == "authors":
            mean = normalize(_ahead(newest, self.ahead), dim=-1)
            keys = normalize(keys, dim=-1)
            counted = counted & (newest.positions >= LEFT_OUT)
        else:
            mean = _mean(newest.queries.float(), newest)
        log_w = self.tau * (mean @ keys.transpose(2, 3)) + newest.log_weights[:, :, None]
        return log_w.masked_fill(~counted[:, :, None], -torch.inf), counted


def _leverage(
    weights: Float[Tensor, "b h g t"], values: Float[Tensor, "b h t e"], ridge: Float[Tensor, "b h g 1"]
) -> Float[Tensor, "b h g t"]:
    """v_i^T (ridge I + sum w v v^T)^-1 v_i, in the precision of `ridge`, one query head at a time."""
    scores = torch.empty_like(weights, dtype=ridge.dtype)
    eye = torch.eye(values.shape[-1], dtype=torch.float64, device=values.device)
    for h in range(weights.shape[1]):
        mine = values[:, h].to(ridge.dtype)
        for g in range(weights.shape[2]):
            w = weights[:, h, g].to(ridge.dtype)
            gram = ((mine * w[..., None]).transpose(1, 2) @ mine).double()
            floor = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-300)
            ridged = gram + torch.maximum(ridge[:, h, g, :, None].double(), floor) * eye
            factor = torch.linalg.cholesky_ex(ridged).L  # fails for NaN only, which the policy reports
            whitened = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False).to(ridge.dtype)
            scores[:, h, g] = (mine @ whitened.transpose(1, 2)).square().sum(-1)
    return scores


def _mean(queries: Float[Tensor, "b h g q d"], observation: Observation) -> Float[Tensor, "b h g d"]:
    weights = observation.query_valid.float() / observation.query_lengths[:, None].clamp_min(1)
    return torch.einsum("bhgqd,bq->bhgd", queries, weights)


def _ahead(observation: Observation, ahead: int) -> Float[Tensor, "b h g d"]:
    """The mean query before its rotation (the first 4 left out), rotated by the mean rotation of the `ahead` positions
    that follow."""
    rotation = rotation_of(observation)
    means = []
    for row in range(observation.queries.shape[0]):
        seen, count = int(observation.seen[row]), int(observation.query_lengths[row])
        count = min(count, max(seen - LEFT_OUT, 0))
        queries = observation.queries[row, :, :, observation.queries.shape[3] - count :]
        positions = torch.arange(seen - count, seen, device=queries.device)
        plain = rotation.undone_sum(queries, positions) / max(count, 1)
        means.append(rotation.turn(plain, *rotation.ahead(seen, ahead, queries.device)))
    return torch.stack(means)
