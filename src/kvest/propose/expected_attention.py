"""Expected attention: what queries to come would attend to, if they were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.propose._base import Propose, at_least, each_head, last, propose_score, rotation_of, value_norms
from kvest.rotary import Rotation
from kvest.types import Observation, Proposal

ELEMENTS = 1 << 22
"""Components of queries held in float32 at once (16 MiB)."""
SINKS = 4
"""Positions whose queries are outliers, and count neither in the mean nor in the covariance."""

Turn = tuple[Float[Tensor, "r"], Float[Tensor, "r"]]


@dataclass(frozen=True)
class ExpectedAttention(Propose):
    """score_i = (mean_g softmax_i(s mu.k_i + s^2/2 k_i^T Sigma k_i + l_i) + eps) norm(v_i)

    s is the scale and l the log weight; exp of the logit is E[exp(s q.k_i + l_i)] of a normal q. mu and Sigma are the
    mean and the covariance of the queries before their rotation, those of the first 4 positions left out, turned by the
    mean rotation of the `ahead` positions that follow. `covariance=False` leaves the second term out, `values=False`
    norm(v_i).

    Source: Expected Attention, arXiv:2510.00636, and its code in kvpress 0.5.5.
    Unlike the paper: in later rounds of a standing budget mu and Sigma are those of the queries since the last round;
    where all queries are at the first 4 positions, all count.
    `peer=True`: as kvpress 0.5.5, whose softmax leaves the first 4 entries out; they score as much as the highest.
    """

    ahead: int = 512
    covariance: bool = True
    values: bool = True
    eps: float = 0.0
    peer: bool = False
    needs_rotation = True

    def __post_init__(self) -> None:
        at_least(1, ahead=self.ahead)
        if not self.eps >= 0:
            raise ValueError(f"expected_attention needs eps >= 0, not {self.eps!r}")

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, observation.queries.shape[3])
        rotation, device = rotation_of(newest), newest.queries.device
        turns = [rotation.ahead(seen, self.ahead, device) for seen in newest.seen.tolist()]
        score = each_head(newest, lambda part, row: self._expected(part, turns[row])) + self.eps
        if self.values:
            score = score * value_norms(newest)
        if self.peer:
            score = torch.where(_first(newest), score.masked_fill(~newest.valid, 0.0).amax(-1, keepdim=True), score)
        return propose_score(newest, score)

    def _expected(self, part: Observation, turn: Turn) -> Float[Tensor, "t"]:
        """Of one head: the mean over the group of the expected attention."""
        rotation = rotation_of(part)
        mean, covariance = moments(part, rotation, covariance=self.covariance)
        keys = part.keys[0, 0].float()
        logits = part.scale * rotation.turn(mean, *turn) @ keys.T
        for g, spread in enumerate(() if covariance is None else covariance):
            turned = rotation.turn(rotation.turn(spread, *turn).T, *turn)
            logits[g] += part.scale**2 / 2 * ((keys @ turned) * keys).sum(dim=-1)
        missing = ~part.valid | _first(part) if self.peer else ~part.valid
        absent = torch.finfo(torch.float32).min / 2  # finite: an empty head has no other
        return (logits + part.log_weights[0, 0]).masked_fill(missing[0], absent).softmax(dim=-1).mean(dim=0)


def _first(observation: Observation) -> Tensor:
    """Entries of the first 4 positions, where a head has others as well."""
    early = observation.valid & (observation.positions < SINKS)
    return early & (observation.valid & ~early).any(dim=-1, keepdim=True)


def moments(
    part: Observation, rotation: Rotation, *, covariance: bool
) -> tuple[Float[Tensor, "g d"], Float[Tensor, "g d d"] | None]:
    """Mean and covariance of one head's queries before their rotation, some queries at a time

    Each piece is centred by its own mean, and the pieces are joined as Chan, Golub and LeVeque 1983 do: no difference
    of large squares.
    """
    queries = part.queries[0, 0]
    g, q, d = queries.shape
    positions = part.seen - q + torch.arange(q, device=queries.device)
    real = part.query_valid[0]
    counted = real & (positions >= SINKS)
    counted = torch.where(counted.any(), counted, real)
    rows = max(1, ELEMENTS // (g * d))
    total = torch.zeros((), device=queries.device)
    mean, squares = queries.new_zeros(g, d, dtype=torch.float32), None
    if covariance:
        squares = queries.new_zeros(g, d, d, dtype=torch.float32)
    for start in range(0, q, rows):
        piece = slice(start, start + rows)
        mine = counted[piece, None]
        plain = rotation.undo(queries[:, piece], positions[None, piece]).masked_fill(~mine, 0.0)
        new = mine.sum().float()
        own = plain.sum(dim=1) / new.clamp_min(1)
        step = own - mean
        share = new / (total + new).clamp_min(1)
        if squares is not None:
            apart = (plain - own[:, None]).masked_fill(~mine, 0.0)
            squares += apart.mT @ apart + total * share * step[:, :, None] * step[:, None, :]
        mean, total = mean + share * step, total + new
    return mean, None if squares is None else squares / total.clamp_min(1)
