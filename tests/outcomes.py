"""All outcomes of a random design, each with its probability: what replaces Monte Carlo in the tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

import reference_sampling as reference
from kvest.random import Stream
from kvest.sample import Poisson, Systematic, WithReplacement
from kvest.types import Draw, Proposal


@dataclass(frozen=True)
class Chosen(Stream):
    """Stands in for randomness: hands out the numbers that it was given, `[b, h, n]`."""

    numbers: Tensor = field(default_factory=lambda: torch.zeros(0))

    def uniform(self, index: Tensor) -> Tensor:
        return self.numbers.double().expand(index.shape).contiguous()


def chosen(numbers: Tensor) -> Chosen:
    return Chosen(0, 0, [0] * len(numbers), numbers=numbers)


def proposal(score: list[float], certain: tuple[int, ...] = (), missing: int = 0) -> tuple[Proposal, Tensor]:
    """(proposal of one head, valid): `missing` slots in front of the scores, `certain` counted after them."""
    scores = torch.tensor([0.0] * missing + score)[None, None]
    sure, valid = torch.zeros_like(scores, dtype=torch.bool), torch.ones_like(scores, dtype=torch.bool)
    sure[..., [missing + i for i in certain]] = True
    valid[..., :missing] = False
    return Proposal(scores, sure), valid


def drawn(design, made, valid, count, numbers) -> Draw:
    """One row for each row of `numbers`: all outcomes of one head in one call."""
    n, t = len(numbers), valid.shape[-1]
    wide = Proposal(made.score.expand(n, 1, t), made.certain.expand(n, 1, t))
    counts, positions = torch.full((n, 1), count), torch.arange(t).expand(n, 1, t)
    return design(wide, valid.expand(n, 1, t), counts, positions, chosen(numbers))


def expect(probability: Tensor, x: Tensor) -> Tensor:
    return (probability[:, None] * x[:, 0].double()).sum(0)


def poisson(made, valid, count) -> tuple[Tensor, Draw]:
    """(probability of each outcome, the outcomes): all 2^t subsets; a coin just below its pi keeps, at it does not."""
    pi = drawn(Poisson(), made, valid, count, torch.zeros(1, 1, 1)).inclusion[0, 0]
    subsets = torch.tensor(list(itertools.product([False, True], repeat=len(pi))))
    coins = torch.where(subsets, pi * (1 - 1e-15), pi.clamp(max=1 - 1e-16))[:, None]
    return torch.where(subsets, pi, 1 - pi).prod(-1), drawn(Poisson(), made, valid, count, coins)


def systematic(made, valid, count) -> tuple[Tensor, Draw]:
    """The start u runs over [0, 1); between two fractional parts of the cumulated pi nothing changes."""
    pi = drawn(Systematic(), made, valid, count, torch.zeros(1, 1, 1)).inclusion[0, 0]
    breaks = torch.cat([torch.tensor([0.0, 1.0]), (pi.masked_fill(pi >= 1, 0).cumsum(-1)) % 1]).unique()
    middles = (breaks[1:] + breaks[:-1]) / 2
    return breaks.diff(), drawn(Systematic(), made, valid, count, middles[:, None, None])


def with_replacement(made, valid, count) -> tuple[Tensor, Draw]:
    """All sequences of n draws; draw i of entry j uses a number in the middle of j's interval."""
    x = (made.score * ~made.certain * valid)[0, 0].double()
    x, entries = x / x.sum(), x.nonzero()[:, 0]
    n = reference.draws_for(x[entries].tolist(), count - int(made.certain.sum()))
    assert len(entries) ** n < 1000
    sequences = torch.tensor(list(itertools.product(entries.tolist(), repeat=n)))
    middles = x.cumsum(0) - x / 2
    outcomes = drawn(WithReplacement(), made, valid, count, middles[sequences][:, None])
    return x[sequences].prod(-1), outcomes
