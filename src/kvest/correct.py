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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.observe import blocks, slots_of
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
    errors = squared_errors(observation, [(draw.keep, [log_weights * tau for tau in grid])])
    return torch.tensor(grid, device=log_weights.device)[errors.argmin(dim=0)]


Choices = Sequence[tuple[Bool[Tensor, "b h t"], Sequence[Float[Tensor, "b h t"]]]]
"""Sets of kept entries, and log weights that each might get."""


def squared_errors(observation: Observation, choices: Choices) -> Float[Tensor, "n b h"]:
    """sum_{g, j} norm(o'_j - o_j)^2 / norm(o_j)^2 over the observed queries, for each of n choices of log weights

    o'_j is the output over the kept entries under these weights. On a CPU a head at a time, so that its block of
    attention stays in the cache while all choices are tried on it.
    """
    if not observation.keys.is_cpu:
        return _squared_errors(observation, choices)
    b, h = observation.lengths.shape
    errors = torch.empty(sum(len(weights) for _, weights in choices), b, h)
    for row in range(b):
        for head in range(h):
            one = slice(row, row + 1), slice(head, head + 1)
            mine = [(keep[one], [log_w[one] for log_w in weights]) for keep, weights in choices]
            errors[:, row, head] = _squared_errors(observation.head(row, head), mine)[:, 0, 0]
    return errors


def _squared_errors(observation: Observation, choices: Choices) -> Float[Tensor, "n b h"]:
    values = observation.values.float()
    kept = [_kept(values, *choice) for choice in choices]
    errors = values.new_zeros((sum(len(weights) for _, weights in choices), *observation.lengths.shape))
    for block in blocks(observation):
        b, h, g, r, visible = block.mass.shape
        mass = block.mass.view(b, h, g * r, visible)
        exact = (mass @ values[:, :, :visible]) / block.total.view(b, h, g * r, 1)
        exists = observation.query_valid[:, None, None, block.slots].expand(b, h, g, r).reshape(b, h, g * r)
        share = exists / exact.square().sum(-1).clamp_min(1e-20)
        n = 0
        for slots, weights, both in kept:
            part = mass.gather(3, slots.clamp(max=visible - 1)[:, :, None].expand(-1, -1, g * r, -1))
            for weight in weights:
                sums = part @ ((weight * (slots < visible))[..., None] * both)
                output = sums[..., :-1] / sums[..., -1:].clamp_min(1e-20)
                errors[n] += ((output - exact).square().sum(-1) * share).sum(dim=-1)
                n += 1
    return errors


def _kept(
    values: Float[Tensor, "b h t e"], keep: Bool[Tensor, "b h t"], log_weights: Sequence[Float[Tensor, "b h t"]]
) -> tuple[Int[Tensor, "b h m"], list[Float[Tensor, "b h m"]], Float[Tensor, "b h m w"]]:
    """(slots, weights, values beside a 1) of the kept entries; where a head has fewer, weights are 0."""
    slots = slots_of(keep)
    there = keep.gather(-1, slots)
    weights = [log_w.gather(-1, slots).exp() * there for log_w in log_weights]
    mine = values.gather(2, slots[..., None].expand(-1, -1, -1, values.shape[3]))
    return slots, weights, torch.nn.functional.pad(mine, (0, 1), value=1.0)


CORRECTIONS: dict[str, type[Correct]] = {
    "none": NoCorrection,
    "inclusion": Inclusion,
    "counts": Counts,
    "tempered": Tempered,
}
