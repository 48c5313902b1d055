"""Groups of neighbouring positions: what is scored or drawn together."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def groups(positions: Int[Tensor, "b h t"], size: int) -> Int[Tensor, "b h t"]:
    """A slot for each entry's group of `size` neighbouring positions, counted from position 0 of its row

    Groups are right-aligned in as many slots as there are entries, as entries are: the last one has the last slot,
    whatever stands in front.
    """
    group = positions.div(size, rounding_mode="floor")
    later = (group[..., 1:] != group[..., :-1]).flip(-1).cumsum(-1).flip(-1)  # groups that follow
    return group.shape[-1] - 1 - torch.nn.functional.pad(later, (0, 1))


def sums(x: Float[Tensor, "b h t"], group: Int[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """The sum of each group, in its slot; 0 in slots without a group."""
    return torch.zeros_like(x).scatter_add_(-1, group, x)
