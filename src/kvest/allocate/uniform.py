"""Uniform allocation: every head of every layer keeps the same number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.sample import Design
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class UniformAllocation(Allocate):
    """counts = min(budget, entries)"""

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        return [torch.minimum(seen.lengths, seen.budget[:, None]) for seen in observations]
