"""One threshold: all heads and layers of a sequence are sampled at one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.allocate._base import Allocate
from kvest.allocate._compete import LEAST_RATE, expected_counts, largest_remainder, own, together
from kvest.sample import Design
from kvest.sample._base import candidates
from kvest.types import Observation, Proposal, Split

MOST_POWER = 8.0
MEASURED = {"calibrated": ("gradient", -1.0), "damage": ("damage", 0.5)}
"""Word for `importance` -> (method of measurement that it stands for, power unless another is given)."""


@dataclass(frozen=True)
class OneThreshold(Allocate):
    """counts_lh = sum_i pi_lhi,  pi = design.inclusion(x, c a_lh^power),  one c with sum_lh counts_lh the whole budget

    x sums to 1 over what each head may draw from. Minimising the summed variance over heads and layers under one
    budget leads to it: peaked heads keep few entries, flat heads many. With `with_replacement` c is one number of
    draws for the whole model; with `top_k` the heads' entries are ranked together. Counts are rounded by largest
    remainder, so that a row keeps its whole budget exactly. Source: ours.
    a is 1 without `importance`, else what `kvest calibrate` measured for each head of the model. `damage`: the KL that
    a head causes per unit of its sampling variance, and power 0.5, which minimises the sum of all heads' damages.
    `calibrated`: how much its output is felt, and power -1, which was found by trying (docs/importance.md).
    `raw=True`: x are the scores as they are, so that a head with larger ones keeps more. They must compare over heads,
    as shares of attention do. With `top_k` it is kvzip's ranking of all entries of the model, arXiv:2505.23416.
    """

    raw: bool = False
    importance: Literal["calibrated", "damage"] | None = None
    power: float | None = None

    whole_model = True

    def __post_init__(self) -> None:
        if self.importance is not None and self.importance not in MEASURED:
            raise ValueError(f"importance must be {' or '.join(MEASURED)} or None, not {self.importance!r}")
        if self.power is None:
            return
        if self.importance is None:
            raise ValueError(f"power={self.power!r} is of the importance: say which, like importance=damage")
        if not abs(self.power) <= MOST_POWER:
            raise ValueError(f"one_threshold needs a power between {-MOST_POWER} and {MOST_POWER}, not {self.power!r}")

    @property
    def needs_calibration(self) -> str | None:
        return None if self.importance is None else MEASURED[self.importance][0]

    def __call__(
        self, proposals: Sequence[Proposal], observations: Sequence[Observation], design: Design
    ) -> list[Int[Tensor, "b h"]]:
        pairs = [candidates(p, o.valid) for p, o in zip(proposals, observations, strict=True)]
        scores = [score for score, _ in pairs]
        split = observations[0].split
        certain = together([kept.sum(dim=-1) for _, kept in pairs], split)
        lengths = together([o.lengths for o in observations], split)
        budget = observations[0].budget * lengths.shape[1]
        free = torch.minimum(budget, lengths.sum(dim=1)) - certain.sum(dim=1)
        compared = _raw(scores, proposals, pairs, split) if self.raw else scores
        rates = None
        if self.importance is not None:
            rates = relative_rates(observations, MEASURED[self.importance][1] if self.power is None else self.power)
        wanted = expected_counts(compared, [o.positions for o in observations], free, design, split, rates=rates)
        counts = certain + largest_remainder(wanted, free, lengths - certain)
        return own(counts, scores, split)


def _raw(
    scores: Sequence[Float[Tensor, "b _ _"]],
    proposals: Sequence[Proposal],
    pairs: Sequence[tuple[Tensor, Tensor]],
    split: Split,
) -> list[Float[Tensor, "b _ _"]]:
    """Normalised scores times what each head's sum is of the largest head's."""
    sums = [(p.score.double() * (x > 0)).sum(dim=-1) for p, (x, _) in zip(proposals, pairs, strict=True)]
    most = together(sums, split).amax(dim=1, keepdim=True).clamp_min(1e-300)
    return [x * (mine / most.to(x.device))[..., None] for x, mine in zip(scores, sums, strict=True)]


def relative_rates(observations: Sequence[Observation], power: float) -> list[Float[Tensor, "_ 1"]]:
    """a_h^power of each layer, divided by the largest of the model; at least `LEAST_RATE`."""
    measured = [o.importance for o in observations if o.importance is not None]
    if len(measured) < len(observations):
        raise ValueError(
            "this allocation weighs heads by their importance and was given none: pass Observation.importance "
            "(kvest calibrate MODEL measures it), or leave importance out"
        )
    logs = [power * a.double().clamp_min(1e-300).log() for a in measured]
    largest = together([x[None] for x in logs], observations[0].split).amax()
    return [(x - largest.to(x.device)).exp().clamp_min(LEAST_RATE)[:, None] for x in logs]
