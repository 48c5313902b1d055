"""Defensive mixture: another proposal, and a little of the uniform one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvest.propose._wrapper import Wrapper
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Mixed(Wrapper):
    """score_i = (1 - eps) x_i / sum x + eps / t      (x: the score of `proposal`, t: the head's entries)

    Scores that see only a few queries miss entries that later ones want. The mixture also bounds the weights: no
    inclusion probability falls below eps times the uniform one.
    The sum is over all entries, sinks among them, which hold most of an attention score: of what is drawn, the uniform
    part is larger than eps.
    Source: defensive importance sampling, Hesterberg 1995, doi:10.1080/00401706.1995.10484303.
    """

    eps: float = 0.2
    deterministic_only = False  # every entry has a share

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:
            raise ValueError(f"mixed needs 0 <= eps <= 1, not {self.eps!r}")

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        total = inner.score.sum(dim=-1, keepdim=True).clamp_min(1e-30)
        share = observation.valid / observation.lengths[..., None].clamp_min(1)
        return replace(inner, score=(1.0 - self.eps) * inner.score / total + self.eps * share)
