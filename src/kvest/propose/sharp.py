"""Sharp: another proposal's score, raised to a power."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvest.propose._wrapper import Wrapper
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Sharp(Wrapper):
    """score_i = top (x_i / top)^c,  top = max_i x_i      (x: the score of `proposal`)

    The head's largest score stays what it was, so that heads can still be compared and no power leaves the range of
    float32. c > 1 gives more of a budget to what scores high, c < 1 less. Source: ours.
    """

    c: float = 1.3

    def __post_init__(self) -> None:
        if not self.c > 0:
            raise ValueError(f"sharp needs c > 0, not {self.c!r}: at 0 it is uniform")

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        top = inner.score.amax(dim=-1, keepdim=True)
        return replace(inner, score=top * (inner.score / top.clamp_min(1e-37)) ** self.c)
