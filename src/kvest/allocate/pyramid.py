"""PyramidKV: early layers keep more than late ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.allocate._compete import largest_remainder
from kvest.sample import Design
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Pyramid(Allocate):
    """counts_l = a + (2 - 1 / beta) f - l / (layers - 1) (2 - 2 / beta) f,  a = sinks + window,  f = budget - a

    A line from the first layer to the last, whose mean over layers is the budget; what is drawn in the last layer is a
    `beta`-th of the mean. Where the first layer would get more than the tokens seen it gets those, and the last layer
    what it leaves. Rounded by largest remainder, so that the layers' counts sum to budget * layers.
    Each layer knows its count by itself: none waits for the others. So a layer that holds less than its count in a
    later round, or is certain of more, does not give to or take from others.
    Source: PyramidKV, arXiv:2406.02069.
    Unlike the paper: the entries that always stay are the policy's sinks and window.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ValueError(f"pyramid needs beta >= 1, not {self.beta!r}: 1 gives all layers the same")

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        return [self._layer(p, o) for p, o in zip(proposals, observations, strict=True)]

    def _layer(self, proposal: Proposal, observation: Observation) -> Int[Tensor, "b h"]:
        budget = torch.minimum(observation.budget, observation.seen)
        most = observation.seen[:, None].expand(-1, observation.layers)
        counts = largest_remainder(self._line(observation, budget), budget * observation.layers, most)
        certain = (proposal.certain & observation.valid).sum(dim=-1)
        return torch.minimum(torch.maximum(counts[:, observation.layer, None], certain), observation.lengths)

    def _line(self, observation: Observation, budget: Int[Tensor, "b"]) -> Float[Tensor, "b l"]:
        """What each layer would keep if entries could be cut."""
        always = torch.minimum(budget, torch.full_like(budget, observation.sinks + observation.window))
        free = (budget - always).double()
        room = (observation.seen - always).double()
        largest = torch.minimum((2.0 - 1.0 / self.beta) * free, room)
        place = torch.linspace(0.0, 1.0, observation.layers, dtype=torch.float64, device=budget.device)
        place = place if observation.layers > 1 else place + 0.5
        return always[:, None] + largest[:, None] + place * 2.0 * (free - largest)[:, None]
