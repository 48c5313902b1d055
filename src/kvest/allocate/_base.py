"""What every allocation is: how many entries each head keeps, given all proposals and a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from kvest.sample import Design
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Allocate(ABC):
    """`allocate(proposals, observations, design) -> counts` for each layer.

    `whole_model` says that heads of different layers compete: the layers are evicted together, after the last one.
    `needs_calibration` names the method of measurement ("gradient", "damage") whose `Observation.importance` it reads.
    """

    whole_model: ClassVar[bool] = False

    @property
    def needs_calibration(self) -> str | None:
        return None

    @abstractmethod
    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]: ...
