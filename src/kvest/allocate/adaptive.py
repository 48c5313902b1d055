"""AdaKV: the scores of a layer's heads compete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.allocate._compete import compete, own, together
from kvest.sample import Design
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Adaptive(Allocate):
    """counts_h = max(sum_i pi_hi, floor * budget),  pi = design.inclusion(x, c),  one c for a layer whose counts then
    sum to budget * heads

    x are the scores as they are, not normalised per head: with `top_k` the entries of all heads of the layer, in
    whatever process, are ranked together. Each head keeps at least `floor` of its share, and what is certain.
    Source: AdaKV, arXiv:2407.11550.
    Unlike the paper: any design; the least share is a bound, under which only heads that would fall below it get more.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"adaptive needs 0 <= floor <= 1, not {self.floor!r}")

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        return [self._layer(p, o, design) for p, o in zip(proposals, observations, strict=True)]

    def _layer(self, proposal: Proposal, observation: Observation, design: Design) -> Int[Tensor, "b h"]:
        lengths = together([observation.lengths], observation.split)
        whole = observation.budget * lengths.shape[1]
        total = torch.minimum(whole, lengths.sum(dim=1))
        share = (self.floor * observation.budget.double() + 1e-9).floor().long()
        counts = compete(proposal, observation, design, total, torch.minimum(share[:, None], lengths))
        return own(counts, [proposal.score], observation.split)[0]
