"""No stand-in: nothing but the weights of what is kept."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvest.stand_in._base import StandIn
from kvest.types import Draw, Kept, Observation


@dataclass(frozen=True)
class NoStandIn(StandIn):
    """The kept entries alone, with the weights of the correction."""

    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept:
        return Kept(observation, log_weights)
