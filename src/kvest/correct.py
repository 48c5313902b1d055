"""Corrections: what does a kept entry stand for?  `Draw -> log weight per kept entry`, added to its logit.

Weights accumulate: a round adds its own log weight to what the entry had. Numerator and denominator of attention are
then unbiased (Horvitz-Thompson), their ratio nearly so (Hajek).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.observe import blocks
from kvest.types import Draw, Observation


@dataclass(frozen=True)
class Correct(ABC):
    """`correct(draw, observation) -> log weights of this round`. `queries`: the latest queries that it looks at."""

    corrects: ClassVar[bool] = True

    @property
    def queries(self) -> int:
        return 0

    @abstractmethod
    def __call__(self, draw: Draw, observation: Observation) -> Float[Tensor, "b h t"]:
        """Float32; 0 on entries that are not kept."""


@dataclass(frozen=True)
class NoCorrection(Correct):
    """log w_i = 0: what is gone is forgotten, and attention renormalised over the rest."""

    corrects = False

    def __call__(self, draw: Draw, observation: Observation) -> Float[Tensor, "b h t"]:
        return torch.zeros_like(observation.log_weights)


@dataclass(frozen=True)
class Inclusion(Correct):
    """log w_i = -log pi_i: Horvitz and Thompson 1952, doi:10.1080/01621459.1952.10483446."""

    def __call__(self, draw: Draw, observation: Observation) -> Float[Tensor, "b h t"]:
        return inclusion_log_weights(draw)


@dataclass(frozen=True)
class Counts(Correct):
    """log w_i = log(c_i / (n x_i)): how often i was drawn over how often it was expected to be

    Self-normalised importance sampling, A Probabilistic Interpretation of KV Cache Eviction. Without replacement
    c_i = 1 and n x_i = pi_i: the same as `inclusion`.
    """

    def __call__(self, draw: Draw, observation: Observation) -> Float[Tensor, "b h t"]:
        ratio = draw.multiplicity / draw.expected.clamp_min(1e-300)
        return ratio.clamp_min(1e-300).log().masked_fill(~draw.keep, 0.0).float()


@dataclass(frozen=True)
class Tempered(Correct):
    """log w_i = -tau log pi_i, 0 <= tau <= 1: less variance for some bias

    `tau="auto"` picks tau for each head at eviction, while the full cache is there: the one of `grid` with the least
    squared error of the output, relative to its norm, over the last `rows` queries. Source: ours; the temperature of A
    Probabilistic Interpretation of KV Cache Eviction has an unknown place. `of="counts"` tempers those weights instead.
    """

    tau: float | Literal["auto"] = 0.85
    of: Literal["inclusion", "counts"] = "inclusion"
    rows: int = 64
    grid = (0.0, 0.25, 0.5, 0.7, 0.85, 1.0)

    def __post_init__(self) -> None:
        if self.tau != "auto" and not (isinstance(self.tau, int | float) and 0 <= self.tau <= 1):
            raise ValueError(f"tempered needs 0 <= tau <= 1 or auto, not {self.tau!r}")
        if self.rows < 1:
            raise ValueError(f"tempered needs rows >= 1, not {self.rows!r}")
        if self.of not in ("inclusion", "counts"):
            raise ValueError(f"tempered knows of=inclusion and of=counts, not {self.of!r}")

    @property
    def queries(self) -> int:
        return self.rows if self.tau == "auto" else 0

    def __call__(self, draw: Draw, observation: Observation) -> Float[Tensor, "b h t"]:
        plain = inclusion_log_weights(draw) if self.of == "inclusion" else Counts()(draw, observation)
        if self.tau != "auto":
            return plain * self.tau
        return plain * best_tau(draw, plain, observation.recent(self.rows), self.grid)[..., None]


def inclusion_log_weights(draw: Draw) -> Float[Tensor, "b h t"]:
    """-log pi_i on kept entries."""
    return -draw.inclusion.clamp_min(1e-300).log().masked_fill(~draw.keep, 0.0).float()


def best_tau(
    draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, grid: tuple[float, ...]
) -> Float[Tensor, "b h"]:
    """The tau of `grid` with the least relative squared error of each head's output on the observed queries."""
    weights = ((log_weights * tau).exp() * draw.keep for tau in grid)
    return torch.tensor(grid, device=log_weights.device)[squared_errors(observation, list(weights)).argmin(dim=0)]


def squared_errors(observation: Observation, weights: Sequence[Float[Tensor, "b h t"]]) -> Float[Tensor, "n b h"]:
    """sum_{g, j} norm(o'_j - o_j)^2 / norm(o_j)^2 over the observed queries, for each of n choices of weights

    o'_j is the output under these weights, 0 for what is not kept.
    """
    values = observation.values.float()
    errors = values.new_zeros((len(weights), *observation.lengths.shape))
    for block in blocks(observation, elements=1 << 18):
        p = block.probabilities
        visible = p.shape[-1]
        exact = p @ values[:, :, None, :visible]
        norms = exact.square().sum(-1).clamp_min(1e-20)
        exists = observation.query_valid[:, block.slots].float()[:, None, None]
        for i, choice in enumerate(weights):
            weight = choice[:, :, None, :visible, None]
            output = (p @ (weight * values[:, :, None, :visible])) / (p @ weight).clamp_min(1e-20)
            errors[i] += ((output - exact).square().sum(-1) / norms * exists).sum(dim=(2, 3))
    return errors


CORRECTIONS: dict[str, type[Correct]] = {
    "none": NoCorrection,
    "inclusion": Inclusion,
    "counts": Counts,
    "tempered": Tempered,
}
