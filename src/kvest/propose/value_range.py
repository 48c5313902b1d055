"""Value range: values whose components lie far apart."""

from __future__ import annotations

from dataclasses import dataclass

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class ValueRange(Propose):
    """score_i = max_c v_ic - min_c v_ic

    Source: VaSE.
    """

    def __call__(self, observation: Observation) -> Proposal:
        least, most = observation.values.aminmax(dim=-1)
        return propose_score(observation, most.float() - least.float())
