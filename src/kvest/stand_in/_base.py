"""What every stand-in is: a frozen dataclass of its knobs that answers for the evicted entries of each head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.types import Draw, Kept, Observation, Proposal


@dataclass(frozen=True)
class StandIn(ABC):
    """`stand_in(draw, log_weights, observation, room) -> Kept`

    `room` is what `room()` answered: the entries that each head makes, which count towards its budget. `queries`: the
    latest queries that it looks at. `shares` marks those that leave a part to the weights of the sample.
    """

    shares: ClassVar[bool] = False

    @property
    def queries(self) -> int:
        return 0

    @property
    def most(self) -> int:
        """Entries that a head makes, at most."""
        return 0

    def room(self, proposal: Proposal, observation: Observation, counts: Int[Tensor, "b h"]) -> Int[Tensor, "b h"]:
        """Entries that each head makes: what is certain stays in any case, and a head that keeps all makes none."""
        free = (counts - proposal.certain.sum(dim=-1)).clamp(0, self.most)
        return torch.where(counts < observation.lengths, free, 0)

    @abstractmethod
    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept: ...


def may_stay(
    proposal: Proposal, observation: Observation, counts: Int[Tensor, "b h"]
) -> tuple[Proposal, Bool[Tensor, "b h t"]]:
    """(the proposal, which entries may stay): made entries are certain in a head that keeps all, and in no other."""
    stays = observation.made & (counts >= observation.lengths)[..., None]
    return replace(proposal, certain=proposal.certain | stays), observation.valid & ~observation.made | stays
