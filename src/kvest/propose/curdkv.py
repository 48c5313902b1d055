"""CurDKV: rows that a CUR decomposition of keys and values would choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.propose._base import Propose, at_least, ordinals, propose_score, tokens
from kvest.random import gaussian
from kvest.types import Observation, Proposal

SINKS, WINDOW = 4, 16
"""Of kvpress."""


@dataclass(frozen=True)
class CurDKV(Propose):
    """score_i = norm(k_i G)^2 norm(v_i G)^2 / rank^2

    G is Gaussian with `rank` columns, one for each layer and width, the same for a `seed` on every machine. The squares
    estimate norm(k_i)^2 norm(v_i)^2, approximate leverage scores of the rows of K and V.

    Source: CurDKV, arXiv:2509.15038.
    `peer=True`: as kvpress 0.5.5. No G; each square is divided by its sum over a window of 16 entries, the product by
    its sum over the head; the first 4 entries score 1.
    """

    rank: int = 20
    seed: int = 0
    peer: bool = False

    def __post_init__(self) -> None:
        at_least(1, rank=self.rank)
        at_least(0, seed=self.seed)

    def __call__(self, observation: Observation) -> Proposal:
        if self.peer:
            score = _local(observation, observation.keys) * _local(observation, observation.values)
            score = score / score.sum(dim=-1, keepdim=True).clamp_min(1e-30)
            return propose_score(observation, score.masked_fill(ordinals(observation) < SINKS, 1.0))
        squares = (self._sketched(x, observation.layer) for x in (observation.keys, observation.values))
        return propose_score(observation, torch.stack(list(squares)).prod(dim=0))

    def _sketched(self, x: Float[Tensor, "b h t d"], layer: int) -> Float[Tensor, "b h t"]:
        """norm(x_i G)^2 / rank."""
        matrix = gaussian(self.seed, layer, x.shape[-1], self.rank).to(x.device, torch.float32)
        return (x.float() @ matrix).square().mean(dim=-1)


def _local(observation: Observation, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t"]:
    """norm(x_i)^2 as a share of i's window of 16 entries, windows counted from the head's first."""
    squares = x.float().square().sum(dim=-1).masked_fill(~tokens(observation), 0.0)
    window = ordinals(observation).clamp_min(0) // WINDOW
    total = torch.zeros_like(squares).scatter_add_(2, window, squares)
    return squares / total.gather(2, window).clamp_min(1e-30)
