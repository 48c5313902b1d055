"""StreamingLLM: the sinks and the most recent entries."""

from __future__ import annotations

from dataclasses import dataclass

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Streaming(Propose):
    """score_i = 1 for the policy's sinks and for the `budget - sinks` most recent entries, else 0

    Source: StreamingLLM, arXiv:2309.17453. Deterministic: all other entries have probability 0, so no weight could
    stand for them.
    Unlike the paper: keys keep the positions at which the model rotated them; they are not renumbered.
    """

    deterministic_only = True

    def __call__(self, observation: Observation) -> Proposal:
        recent = (observation.budget - observation.sinks)[:, None, None]
        newest = observation.positions >= observation.seen[:, None, None] - recent
        return propose_score(observation, ((observation.positions < observation.sinks) | newest).float())
