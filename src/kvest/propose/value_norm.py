"""Value norm: long values move the output most."""

from __future__ import annotations

from dataclasses import dataclass

from kvest.propose._base import Propose, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class ValueNorm(Propose):
    """score_i = norm(v_i)

    Source: the value half of VATP, arXiv:2406.12335, which multiplies attention by the L1 norm of the value.
    Unlike the paper: the L2 norm, alone; `h2o(values=True)` is the product with attention.
    """

    def __call__(self, observation: Observation) -> Proposal:
        return propose_score(observation, value_norms(observation))
