"""Named randomness: a uniform number is a pure function of (seed, layer, head, round, index, attempt).

Nothing is drawn in sequence, so a number does not depend on the batch, on padding, or on how many processes the heads
are split over. The function is SplitMix64's finaliser (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) applied
once for every part of the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


@dataclass(frozen=True)
class Stream:
    """The random numbers of one layer: `rounds[row]` is how often that row was evicted before; `heads` names the
    first head, for a process that holds a slice of them; `attempt` tells several draws of one round apart."""

    seed: int
    layer: int
    rounds: Sequence[int]
    first_head: int = 0
    attempt: int = 0

    def uniform(self, index: Int[Tensor, "b h n"]) -> Float[Tensor, "b h n"]:
        """Uniform numbers in [0, 1), float64, one for each (row, head, index)."""
        device = index.device
        x = _mix(torch.full_like(index, _signed(self.seed * _GOLDEN + 1)))
        heads = torch.arange(index.shape[1], device=device)[None, :, None] + self.first_head
        rounds = torch.tensor(list(self.rounds), dtype=torch.int64, device=device)[:, None, None]
        parts = [torch.full_like(index, self.layer), heads, rounds, index]
        if self.attempt:  # 0 is no part of the name
            parts.append(torch.full_like(index, self.attempt))
        for part in parts:
            x = _mix(x + (part + 1) * _signed(_GOLDEN))
        return _shift(x, 11).double() * 2.0**-53

    def one(self, like: Int[Tensor, "b h n"]) -> Float[Tensor, "b h 1"]:
        """One uniform number for each row and head."""
        return self.uniform(torch.full_like(like[..., :1], -1))


def gaussian(seed: int, layer: int, rows: int, columns: int) -> Float[Tensor, "n k"]:
    """Standard normal numbers, float64, by the method of Box and Muller, doi:10.1214/aoms/1177706645

    On the CPU, whatever the device they are for: logarithms and cosines may differ by a bit elsewhere.
    """
    index = torch.arange(2 * rows * columns)[None, None]
    first, second = Stream(seed, layer, [0]).uniform(index).view(2, rows, columns)
    return (-2.0 * (-first).log1p()).sqrt() * (2.0 * torch.pi * second).cos()
