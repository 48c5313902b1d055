"""What queries saw, computed block by block: no `t x t` matrix and no repeated keys ever exist.

Every attention-based score is a column sum of the attention matrix under weights on its rows:
`score_i = sum_j weight_j p_j(i)`. `attended` is that sum; the methods differ in their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvest.types import Observation

BLOCK_ELEMENTS = 1 << 19
"""Logits held at once (2 MiB in float32): small enough to stay in cache, large enough to amortise the calls."""
LEAST_ROWS = 64
"""Rows of a block at least, however long the context: a matrix product of fewer wastes the processor."""

NEGLIGIBLE = 60.0
"""Logits this far below a row's largest are raised to it: exp(-60) adds nothing to a float32 sum, while the denormal
numbers that it avoids make the sums nine times slower on a CPU."""


@dataclass(frozen=True)
class Block:
    """Attention of some queries over the first `v` slots, in float32: `p_j(i) = mass_ji / total_j`.

    `slots` are the queries' slots in the observation. Rows of missing queries hold garbage; weigh them by 0. The memory
    belongs to the next block as well: use a block before you ask for another.
    """

    slots: Int[Tensor, "r"]
    mass: Float[Tensor, "b h g r v"]
    total: Float[Tensor, "b h g r"]

    @property
    def probabilities(self) -> Float[Tensor, "b h g r v"]:
        """p_j(i)."""
        return self.mass / self.total[..., None]


def blocks(
    observation: Observation, slots: Int[Tensor, "r"] | None = None, *, causal: bool = True, elements: int | None = None
) -> Iterator[Block]:
    """Attention rows of the observed queries, a block at a time, softmax over valid (and earlier) entries.

    `p_j(i) = softmax_i(scale q_j.k_i + log_weight_i)`. `slots` picks query slots (ascending; default: all of them).
    `causal=False` lets every query see the whole prompt. Memory: `elements` float32 numbers.
    """
    b, h, g, q, d = observation.queries.shape
    t = observation.keys.shape[2]
    device = observation.keys.device
    contiguous = slots is None
    slots = torch.arange(q, device=device) if slots is None else slots
    queries = observation.queries if contiguous else observation.queries[:, :, :, slots]
    keys = observation.keys.float().contiguous().flatten(0, 1).transpose(1, 2)
    bias = _bias(observation)
    size = max(BLOCK_ELEMENTS, LEAST_ROWS * t) if elements is None else elements
    rows = max(1, min(len(slots), size // (b * h * g * t)))
    memory = torch.empty(b * h * g * rows * t, dtype=torch.float32, device=device)  # one block's, used again for each
    for start in range(0, len(slots), rows):
        chosen = slots[start : start + rows]
        r = len(chosen)
        if not causal:
            visible = t
        elif contiguous:
            visible = t - q + start + r
        else:
            visible = t - q + int(chosen[-1]) + 1
        packed = queries[:, :, :, start : start + r].float().reshape(b * h, g * r, d) * observation.scale
        logits = memory[: b * h * g * r * visible].view(b * h, g * r, visible)
        torch.bmm(packed, keys[..., :visible], out=logits)
        logits = logits.view(b, h, g, r, visible)
        if bias is not None:
            logits += bias[:, :, None, None, :visible]
        first = t - q + (start if contiguous else int(chosen[0])) if causal and r > 1 else visible
        later = torch.arange(first, visible, device=device) > (t - q + chosen)[:, None]  # none is, before first
        logits[..., first:].masked_fill_(later, -torch.inf)
        logits.sub_(logits.amax(dim=-1, keepdim=True)).clamp_min_(-NEGLIGIBLE).exp_()
        logits[..., first:].masked_fill_(later, 0.0)
        yield Block(chosen, logits, logits.sum(dim=-1))


def _bias(observation: Observation) -> Float[Tensor, "b h t"] | None:
    """Log weights, and a very negative number on missing slots (finite: a missing query may see nothing else)."""
    complete = bool((observation.lengths == observation.keys.shape[2]).all())
    exact = not bool(observation.log_weights.any())
    if complete and exact:
        return None
    return observation.log_weights.masked_fill(~observation.valid, torch.finfo(torch.float32).min)


def by_head(
    observation: Observation, score: Callable[[Observation, slice], Float[Tensor, "_ _ t"]]
) -> Float[Tensor, "b h t"]:
    """`score(part, rows)` of every part of an observation, put together

    On a CPU a part is one head, whose logits then stay in the cache for all that is done to them (a quarter faster);
    elsewhere it is everything at once.
    """
    b, h, t, _ = observation.keys.shape
    if not observation.keys.is_cpu:
        return score(observation, slice(0, b))
    out = torch.empty(b, h, t)
    for row in range(b):
        for head in range(h):
            out[row, head] = score(observation.head(row, head), slice(row, row + 1))[0, 0]
    return out


def attended(
    observation: Observation,
    weights: Float[Tensor, "b r"],
    slots: Int[Tensor, "r"] | None = None,
    *,
    causal: bool = True,
) -> Float[Tensor, "b h t"]:
    """`mean_g sum_j weights_j p_j(i)`; float32, 0 on missing slots."""
    return by_head(observation, lambda part, rows: _attended(part, weights[rows], slots, causal=causal))


def _attended(
    observation: Observation, weights: Float[Tensor, "b r"], slots: Int[Tensor, "r"] | None, *, causal: bool
) -> Float[Tensor, "b h t"]:
    b, h, g, _, _ = observation.queries.shape
    total = observation.keys.new_zeros((b * h, 1, observation.keys.shape[2]), dtype=torch.float32)
    start = 0
    for block in blocks(observation, slots, causal=causal):
        r, visible = block.mass.shape[-2:]
        weight = (weights[:, None, None, start : start + r].float() / (g * block.total)).view(b * h, 1, g * r)
        part = total[..., :visible]
        torch.baddbmm(part, weight, block.mass.view(b * h, g * r, visible), out=part)
        start += r
    return total.view(b, h, -1) * observation.valid


def query_weights(observation: Observation) -> Float[Tensor, "b q"]:
    """1 for every query that exists, 0 for missing ones."""
    return observation.query_valid.float()
