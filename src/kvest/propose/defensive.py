"""Defensive aggregation: what one query needed, however seldom."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvest.propose._wrapper import Wrapper
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Defensive(Wrapper):
    """score_i: that of `proposal` with max_{g, j} p_j(i) in place of the mean, over the queries j that it looks at

    The mean forgets an entry that few queries need; the maximum guards against the worst of them. Weights of queries
    only select (harmonic: all alike), and attention from earlier rounds is combined by its maximum.
    Source: defensive aggregation, DefensiveKV, arXiv:2510.13334.
    Unlike the paper: any attention-based score; the query heads of a group are aggregated like queries; its correction
    by a prior risk is left to `mixed`, which lifts all entries likewise.
    """

    def __post_init__(self) -> None:
        if not self.proposal.attends:
            raise ValueError(
                f"defensive takes the largest attention of several queries, and {type(self.proposal).__name__} does "
                "not add attention up: wrap an attention-based proposal, as in defensive(snapkv)"
            )

    def __call__(self, observation: Observation) -> Proposal:
        return self.proposal(replace(observation, reduction="max"))
