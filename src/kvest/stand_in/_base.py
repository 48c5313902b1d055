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
    latest queries that it looks at. `shares` marks those that leave a part to the weights of the sample, `brings_back`
    those that hold what is gone elsewhere.
    """

    shares: ClassVar[bool] = False
    brings_back: ClassVar[bool] = False

    @property
    def queries(self) -> int:
        return 0

    @property
    def most(self) -> int:
        """Entries that a head makes, at most."""
        return 0

    def beside(self, key_width: int, value_width: int) -> int:
        """Numbers that a head holds besides its entries."""
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


def mean_query(observation: Observation) -> Float[Tensor, "b h d"]:
    """The mean of a row's queries over the group; 0 for a row without any."""
    exists = observation.query_valid[:, None, None, :, None]
    total = observation.queries.float().masked_fill(~exists, 0.0).sum(dim=(2, 3))
    return total / (observation.query_lengths.clamp_min(1) * observation.queries.shape[2])[:, None, None]
