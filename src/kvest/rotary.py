"""The rotary embedding of a layer, undone and redone.

A model turns each pair of components of a query or key by an angle that is its position times the pair's frequency.
Statistics of queries that future positions would ask with need them as they were before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """How one layer turns its queries and keys.

    `frequencies() -> (angle per position of each of n pairs, factor)`, read when it is needed: some models change them
    as the context grows, and what counts is what they were in the last pass. The first 2n components are turned, the
    others left alone; a model that turns none has n = 0. Component c is paired with c + n, or `interleaved` with its
    neighbour. The factor multiplies what is turned (1, or the attention factor of yarn).
    """

    frequencies: Callable[[], tuple[Float[Tensor, "n"], float]]
    interleaved: bool = False

    def at(self, positions: Int[Tensor, "*p"]) -> tuple[Float[Tensor, "*p r"], Float[Tensor, "*p r"]]:
        """(cos, sin) of every turned component, r = 2n, float32, times the factor."""
        frequencies, factor = self.frequencies()
        angles = positions[..., None].float() * frequencies.to(positions.device, torch.float32)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles.cos() * factor, angles.sin() * factor

    def ahead(self, seen: int, count: int, device: torch.device) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"]]:
        """The mean (cos, sin) of the `count` positions that follow `seen` tokens."""
        cos, sin = self.at(torch.arange(seen, seen + count, device=device))
        return cos.mean(0), sin.mean(0)

    def turn(
        self, x: Float[Tensor, "*n d"], cos: Float[Tensor, "*#n r"], sin: Float[Tensor, "*#n r"]
    ) -> Float[Tensor, "*n d"]:
        """`x` turned: x cos + half(x) sin, half(x) the partner of each component with its sign."""
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat((turned * cos + self._half(turned) * sin, rest), dim=-1)

    def undo(self, x: Float[Tensor, "*n d"], positions: Int[Tensor, "*#n"]) -> Float[Tensor, "*n d"]:
        """`x` as it was before it was turned at these positions, float32."""
        cos, sin = self._inverse(positions)
        return self.turn(x.float(), cos, sin)

    def undone_sum(self, x: Float[Tensor, "... n d"], positions: Int[Tensor, "n"]) -> Float[Tensor, "... d"]:
        """`sum_n undo(x)` without a copy of all of `x`: half is linear, so that the sum can come first."""
        cos, sin = self._inverse(positions)
        r = cos.shape[-1]
        # half(x) sin = half(x sin) where partners share their sin, and they do: the angle is the pair's.
        heads = x.flatten(0, -3)
        along = torch.stack([(head[:, :r].float() * cos).sum(0) for head in heads])
        across = torch.stack([(head[:, :r].float() * sin).sum(0) for head in heads])
        rest = heads[..., r:].float().sum(dim=1)
        return torch.cat((along + self._half(across), rest), dim=-1).view(*x.shape[:-2], -1)

    def _inverse(self, positions: Int[Tensor, "*p"]) -> tuple[Float[Tensor, "*p r"], Float[Tensor, "*p r"]]:
        cos, sin = self.at(positions)
        size = cos.square() + sin.square()  # 1, or the square of the factor
        return cos / size, -sin / size

    def _half(self, x: Float[Tensor, "... r"]) -> Float[Tensor, "... r"]:
        if self.interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
