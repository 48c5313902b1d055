"""What every design is: a random set of kept entries with known inclusion probabilities.

A design is one monotone function, `inclusion(score, rate, positions)`: the probability of keeping an entry at a given
sampling rate. A head's own rate is the one at which the probabilities sum to its count; one rate for heads that compete
is what `allocate/_compete.py` solves for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.correct import Correct
from kvest.random import Stream
from kvest.types import Draw, Observation, Proposal

TINY = 1e-30
"""Relative floor of a score: entries of score 0 are kept only once every other one is certain, and then equally."""


@dataclass(frozen=True)
class Design(ABC):
    """`design(proposal, counts, positions, stream) -> Draw`; `random` is False where probabilities are 0 and 1.

    `queries`: the latest queries that `corrected` looks at.
    """

    random: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    @property
    def queries(self) -> int:
        return 0

    @abstractmethod
    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        """P(entry kept) at this rate; non-decreasing in it. `score` sums to 1 over what may be drawn, 0 elsewhere: of
        each head, or of the heads of a layer together where these compete as they are.
        """

    @abstractmethod
    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        """Draw `counts` entries; `score` as in `inclusion`, 0 on what may not be drawn."""

    def __call__(
        self,
        proposal: Proposal,
        valid: Bool[Tensor, "b h t"],
        counts: Int[Tensor, "b h"],
        positions: Int[Tensor, "b h t"],
        stream: Stream,
    ) -> Draw:
        """Certain entries stay; `counts` minus those are drawn from the rest of the valid ones."""
        score, certain = candidates(proposal, valid)
        drawn = self.draw(score, counts - certain.sum(dim=-1), positions, stream)
        return Draw(
            keep=drawn.keep | certain,
            inclusion=drawn.inclusion.masked_fill(certain, 1.0),
            multiplicity=drawn.multiplicity.masked_fill(certain, 1),
            expected=drawn.expected.masked_fill(certain, 1.0),
        )

    def corrected(
        self,
        proposal: Proposal,
        observation: Observation,
        valid: Bool[Tensor, "b h t"],
        counts: Int[Tensor, "b h"],
        stream: Stream,
        correct: Correct,
    ) -> tuple[Draw, Float[Tensor, "b h t"]]:
        """A draw and its log weights, together: a design may choose between several by what they would do."""
        draw = self(proposal, valid, counts, observation.positions, stream)
        return draw, correct(draw, observation)


@dataclass(frozen=True)
class Proportional(Design):
    """A design whose inclusion probabilities are pi_i = min(1, c x_i)."""

    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        return (score * rate).clamp_max(1.0)


def candidates(
    proposal: Proposal, valid: Bool[Tensor, "b h t"]
) -> tuple[Float[Tensor, "b h t"], Bool[Tensor, "b h t"]]:
    """(score of what may be drawn, float64, summing to 1 per head; certain entries)."""
    score = proposal.score.double()
    open_ = valid & ~proposal.certain
    largest = (score * open_).amax(dim=-1, keepdim=True)
    floor = torch.where(largest > 0, largest * TINY, torch.ones_like(largest))
    score = torch.maximum(score, floor) * open_
    return score / score.sum(dim=-1, keepdim=True).clamp_min(1e-300), proposal.certain & valid


def proportional(score: Float[Tensor, "... t"], counts: Int[Tensor, "..."]) -> Float[Tensor, "... t"]:
    """pi_i = min(1, c x_i) with c such that the sum is `counts`, exactly: by sorting, without iteration."""
    ordered, order = score.sort(dim=-1, descending=True)
    tail = ordered.flip(-1).cumsum(-1).flip(-1)  # sum of this entry and all smaller ones
    rank = torch.arange(score.shape[-1], device=score.device)
    left = counts[..., None] - rank
    # Entry of rank r is certain when, given that all larger ones are, c x_r = left x_r / tail_r reaches 1.
    full = (left > 0) & (ordered > 0) & (left * ordered >= tail * (1.0 - 1e-12))
    full = full.long().cummin(dim=-1).values.bool()
    number = full.sum(dim=-1, keepdim=True)
    rest = torch.gather(torch.nn.functional.pad(tail, (0, 1)), -1, number).clamp_min(1e-300)
    rate = (counts[..., None] - number).clamp_min(0) / rest
    pi = torch.where(full, torch.ones_like(ordered), (rate * ordered).clamp_max(1.0))
    return torch.empty_like(pi).scatter_(-1, order, pi)


def cumulated(part: Float[Tensor, "b h t"]) -> tuple[Float[Tensor, "b h t"], Float[Tensor, "b h 1"]]:
    """(C_i, the sum of all), for probabilities that sum to a whole number up to rounding: to exactly that one."""
    total = part.sum(dim=-1, keepdim=True)
    whole = total.round()
    sums = part.cumsum(-1) * (whole / total.clamp_min(1e-300))
    return torch.where(sums >= sums[..., -1:], whole, sums), whole
