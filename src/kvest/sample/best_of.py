"""Best of several draws: rerandomisation, as in experimental design."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.correct import Correct, squared_errors
from kvest.random import Stream
from kvest.sample._base import Design
from kvest.types import Draw, Observation, Proposal


@dataclass(frozen=True)
class BestOf(Design):
    """Of `n` draws of `design`, the one of least sum_j norm(o'_j - o_j)^2 / norm(o_j)^2, for each head

    j: the last `rows` queries, o_j their output over all entries, o'_j over those that the draw keeps, corrected: known
    at eviction, while the full cache is there. The first draw is the one that `design` alone makes.
    The stated inclusion probabilities are those of one draw. Choosing changes them slightly: entries that the reference
    queries attend to are kept a little more often, and error estimates come out a little too large for such queries.
    Source: rerandomisation, Morgan and Rubin 2012, doi:10.1214/12-AOS1008; for eviction: ours.
    """

    design: Design
    n: int = 4
    rows: int = 64

    def __post_init__(self) -> None:
        for name in ("n", "rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"best_of needs {name} to be a whole number of at least 1, not {value!r}")
        if not self.design.random:
            raise ValueError("best_of needs a random design, like systematic: all draws of this one are alike")
        if self.design.queries:
            raise ValueError("best_of chooses once: write best_of(DESIGN, n=256), not best_of inside another one")

    @property
    def queries(self) -> int:
        return self.rows

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]  # of the inner design
        return self.design.fixed_size

    def inclusion(
        self, score: Float[Tensor, "b h t"], rate: Float[Tensor, "b #h 1"], positions: Int[Tensor, "b h t"]
    ) -> Float[Tensor, "b h t"]:
        return self.design.inclusion(score, rate, positions)

    def draw(
        self, score: Float[Tensor, "b h t"], counts: Int[Tensor, "b h"], positions: Int[Tensor, "b h t"], stream: Stream
    ) -> Draw:
        return self.design.draw(score, counts, positions, stream)

    def corrected(
        self,
        proposal: Proposal,
        observation: Observation,
        valid: Bool[Tensor, "b h t"],
        counts: Int[Tensor, "b h"],
        stream: Stream,
        correct: Correct,
    ) -> tuple[Draw, Float[Tensor, "b h t"]]:
        draws, corrections = [], []
        for attempt in range(self.n):
            draw = self(proposal, valid, counts, observation.positions, replace(stream, attempt=attempt))
            draws.append(draw)
            corrections.append(correct(draw, observation))
        choices = [(draw.keep, [log_w]) for draw, log_w in zip(draws, corrections, strict=True)]
        best = squared_errors(observation.recent(self.rows), choices).argmin(dim=0)

        def chosen(choices: list[Tensor]) -> Tensor:
            index = best[None, ..., None].expand(1, *choices[0].shape)
            return torch.stack(choices).gather(0, index)[0]

        names = ("keep", "inclusion", "multiplicity", "expected")
        return Draw(**{name: chosen([getattr(draw, name) for draw in draws]) for name in names}), chosen(corrections)
