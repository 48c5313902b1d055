"""What every proposal is: a frozen dataclass of its knobs, called with an `Observation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvest.rotary import Rotation
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Propose(ABC):
    """`score >= 0` for every entry; entries that are certain to stay, if the method has any of its own.

    `queries` is how many of the latest queries the method looks at (0: none, None: all). `deterministic_only` marks
    scores that are no proposal density (most entries have score 0), `carries` those that add up over rounds, `attends`
    those that are made by `observe.attended` and follow `Observation.reduction`, `exchangeable` those that give equal
    entries equal scores, wherever they stand. `needs_rotation` marks those that undo the rotary embedding,
    `needs_output` those that look at the layer's output projection. `extra_passes` is how many tokens of the document
    the model repeats in each of the passes that the method asks for before it scores (0: none).
    """

    deterministic_only: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    attends: ClassVar[bool] = False
    exchangeable: ClassVar[bool] = True
    needs_rotation: ClassVar[bool] = False
    needs_output: ClassVar[bool] = False
    extra_passes: ClassVar[int] = 0

    @property
    def queries(self) -> int | None:
        return 0

    @abstractmethod
    def __call__(self, observation: Observation) -> Proposal: ...


def at_least(least: int, **knobs: int | None) -> None:
    """Raise ValueError for a knob that is smaller, or no whole number; None is left out."""
    for name, value in knobs.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def propose_score(observation: Observation, score: Float[Tensor, "b h t"]) -> Proposal:
    """A proposal without certain entries: score in float32, 0 on missing slots."""
    valid = observation.valid
    return Proposal(score.float().masked_fill(~valid, 0.0), torch.zeros_like(valid))


def value_norms(observation: Observation) -> Float[Tensor, "b h t"]:
    """norm(v_i), float32."""
    return torch.linalg.vector_norm(observation.values.float(), dim=-1)


def tokens(observation: Observation) -> Bool[Tensor, "b h t"]:
    """Which slots hold an entry that a token wrote, and none that was made to stand in for others."""
    return observation.valid & ~observation.made


def ordinals(observation: Observation) -> Int[Tensor, "b h t"]:
    """The place of a token's entry in its head, from 0; negative on what stands before: missing and made ones."""
    return torch.arange(observation.keys.shape[2], device=observation.keys.device) - (
        observation.keys.shape[2] - tokens(observation).sum(dim=-1, keepdim=True)
    )


def pooled(score: Float[Tensor, "b h t"], counted: Bool[Tensor, "b h t"], pool: int) -> Float[Tensor, "b h t"]:
    """The mean over those of `pool` neighbours that count."""
    total, present = (avg_pool1d(x, pool, stride=1, padding=pool // 2) for x in (score * counted, counted.float()))
    return total / present.clamp_min(1e-6)


def each_head(
    observation: Observation, score: Callable[[Observation, int], Float[Tensor, "t"]]
) -> Float[Tensor, "b h t"]:
    """`score(part, row)` of every head alone, put together: what it copies is never there for two heads at once."""
    b, h, t, _ = observation.keys.shape
    out = torch.empty(b, h, t, dtype=torch.float32, device=observation.keys.device)
    for row in range(b):
        for head in range(h):
            out[row, head] = score(observation.head(row, head), row)
    return out


def last(observation: Observation, count: int) -> Observation:
    """The latest `count` queries; a clear error where there are none."""
    if observation.queries.shape[3] == 0:
        raise ValueError("this proposal looks at queries, and the observation has none: observe() needs queries")
    return observation.recent(count)


def rotation_of(observation: Observation) -> Rotation:
    """The rotary embedding to undo; a clear error where it was not given."""
    if observation.rotation is None:
        raise ValueError(
            "this proposal undoes the rotary embedding and was given none: pass Observation.rotation (one of 0 "
            "frequencies for a model without), or take another proposal"
        )
    return observation.rotation


def output_of(observation: Observation) -> Float[Tensor, "h g m e"]:
    """The output projection of each query head; a clear error where it was not given."""
    if observation.output is None:
        raise ValueError("this proposal looks at the output projection and was given none: pass Observation.output")
    return observation.output
