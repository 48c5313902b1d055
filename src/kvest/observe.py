"""What queries saw, computed block by block: no `t x t` matrix and no repeated keys ever exist.

Every attention-based score is a column sum of the attention matrix under weights on its rows:
`score_i = sum_j weight_j p_j(i)`. `attended` is that sum, or the largest of its terms; the methods differ in their
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.types import Observation

BLOCK_ELEMENTS = 1 << 19
"""Logits held at once (2 MiB in float32): small enough to stay in cache, large enough to amortise the calls."""
LEAST_ROWS = 64
"""Rows of a matrix product at least, however long the context: fewer waste the processor. A head has `g` a query."""

HEADROOM = 30.0
"""The row's reference logit becomes exp(30): 117 nats below it, not 87, begin the denormal numbers, which a CPU adds up
many times slower; 39 nats above it, sums are too large to be divided by."""
SMALLEST, LARGEST = 1e9, 1e30
"""Between these the sum of a row is as it should be: exp(30) and more, unless rounding moves a huge reference."""


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
    b, h, g, q, _ = observation.queries.shape
    t = observation.keys.shape[2]
    device = observation.keys.device
    contiguous = slots is None
    slots = torch.arange(q, device=device) if slots is None else slots
    own = t - q + slots
    missing = None
    if not bool((observation.query_lengths == q).all()):
        missing = (~observation.query_valid[:, slots])[:, None, None].expand(b, h, 1, len(slots)).flatten(0, 1)
    keys = _keys(observation)
    known = observation.normalizers is not None and causal
    queries = _queries(observation, keys, own, missing, known)
    size = max(BLOCK_ELEMENTS, LEAST_ROWS * t) if elements is None else elements
    if elements is None and not keys.is_cpu:  # all heads are in one block there
        size *= b * h
    rows = max(1, min(len(own), size // (b * h * g * t)))
    memory = torch.empty(b * h * g * rows * t, dtype=torch.float32, device=device)  # one block's, used again for each
    triangle = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    for start in range(0, len(own), rows):
        mine = own[start : start + rows]
        r = len(mine)
        if not causal:
            visible, later = t, triangle[:r, :0]
        elif contiguous:
            visible, later = t - q + start + r, triangle[:r, :r]
        else:
            visible = int(mine[-1]) + 1
            later = torch.arange(int(mine[0]), visible, device=device) > mine[:, None]
        mass = memory[: b * h * g * r * visible].view(b * h, g, r, visible)
        absent = None if missing is None else missing[..., start : start + r]
        total = _exponentials(queries[:, :, start : start + r], keys[..., :visible], later, absent, mass, known)
        yield Block(slots[start : start + rows], mass.view(b, h, g, r, visible), total.view(b, h, g, r))


def _keys(observation: Observation) -> Float[Tensor, "n c t"]:
    """Scaled keys, a row of ones and a row of log weights, `c = d + 2`

    A query beside (-shift, 1) gets its shifted and weighted logits in one matrix product. Missing slots have a very
    negative log weight (finite: a missing query may see nothing else).
    """
    b, h, t, d = observation.keys.shape
    out = torch.ones(b * h, d + 2, t, dtype=torch.float32, device=observation.keys.device)
    out[:, :d] = observation.keys.flatten(0, 1).transpose(1, 2)
    out[:, :d] *= observation.scale
    absent = torch.finfo(torch.float32).min / 2
    out[:, d + 1] = observation.log_weights.masked_fill(~observation.valid, absent).flatten(0, 1)
    return out


def _queries(
    observation: Observation,
    keys: Float[Tensor, "n c t"],
    own: Int[Tensor, "r"],
    missing: Bool[Tensor, "n 1 r"] | None,
    known: bool,
) -> Float[Tensor, "n g r c"]:
    """Queries of these slots, beside (-shift, 1)

    Where normalizers are known they are the shift: exponentials are probabilities. Otherwise the reference is the
    larger of two logits that the row has: of its own entry, and of the first, often an attention sink. The row's
    largest is no less, and hardly ever much more: it need not be looked for.
    """
    b, h, g, q, d = observation.queries.shape
    t = keys.shape[2]
    whole = len(own) == q
    out = torch.empty(b * h, g, len(own), d + 2, dtype=torch.float32, device=keys.device)
    out[..., :d] = (observation.queries if whole else observation.queries[:, :, :, own - (t - q)]).flatten(0, 1)
    out[..., d], out[..., d + 1] = 0.0, 1.0
    if missing is not None:  # no numbers that could overflow
        out[..., :d].masked_fill_(missing[..., None], 0.0)
    if known:
        assert observation.normalizers is not None
        normalizers = (observation.normalizers if whole else observation.normalizers[..., own - (t - q)]).flatten(0, 1)
        out[..., d] = -(normalizers if missing is None else normalizers.masked_fill(missing, 0.0))
        return out
    heads = torch.arange(b * h, device=keys.device)
    first = keys[heads, :, (t - observation.lengths).clamp(max=t - 1).flatten()]
    mine = keys[:, :, t - q :] if whole else keys[:, :, own]
    reference = torch.maximum(
        (out * mine.transpose(1, 2)[:, None]).sum(dim=-1), (out @ first[:, None, :, None])[..., 0]
    )
    out[..., d] = HEADROOM - reference
    return out


def _exponentials(
    queries: Float[Tensor, "n g r c"],
    keys: Float[Tensor, "n c v"],
    later: Bool[Tensor, "r w"],
    missing: Bool[Tensor, "n 1 r"] | None,
    out: Float[Tensor, "n g r v"],
    known: bool,
) -> Float[Tensor, "n g r"]:
    """`exp(logit - shift)` into `out`, 0 where one of the last `w` entries is later than the query; returns the sums.
    Where normalizers are known, they are 1, and the rest need not be looked at.

    Where the sum of a query that is not missing comes out too large or too small, the reference is the row's largest
    logit after all.
    """
    n, g, r, v = out.shape
    packed = queries.reshape(n, g * r, -1)
    diagonal = out[..., v - later.shape[1] :]

    def product() -> None:
        torch.bmm(packed, keys, out=out.view(n, g * r, v))

    def exponentials() -> Float[Tensor, "n g r"]:
        out.exp_()
        diagonal.masked_fill_(later, 0.0)
        return out.sum(dim=-1).clamp_min_(1.0)  # only a missing query sees nothing

    product()
    if known:
        out.exp_()
        diagonal.masked_fill_(later, 0.0)
        if missing is not None:
            out.masked_fill_(missing[..., None], 0.0)
        return out.new_ones(n, g, r)
    total = exponentials()
    least, most = (total if missing is None else total.masked_fill(missing, LARGEST / 2)).aminmax()
    if not (float(least) > SMALLEST and float(most) < LARGEST):
        product()
        diagonal.masked_fill_(later, torch.finfo(torch.float32).min / 2)
        out.sub_(out.amax(dim=-1, keepdim=True) - HEADROOM)
        total = exponentials()
    return total


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
    out = torch.empty(b, h, t, dtype=torch.float32)
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
    """`mean_g sum_j weights_j p_j(i)`; float32, 0 on missing slots

    Under `reduction="max"` it is `max_{g, j} p_j(i)` over the queries of positive weight: there weights only select.
    """
    return by_head(observation, lambda part, rows: _attended(part, weights[rows], slots, causal=causal))


def _attended(
    observation: Observation, weights: Float[Tensor, "b r"], slots: Int[Tensor, "r"] | None, *, causal: bool
) -> Float[Tensor, "b h t"]:
    b, h, g, _, _ = observation.queries.shape
    score = observation.keys.new_zeros((b * h, 1, observation.keys.shape[2]), dtype=torch.float32)
    weights = weights[:, None, None].float() / g
    start = 0
    for block in blocks(observation, slots, causal=causal):
        r, visible = block.mass.shape[-2:]
        mass, mine = block.mass.view(b * h, g * r, visible), weights[..., start : start + r]
        if observation.reduction == "max":
            scale = (1.0 / block.total).view(b * h, g * r, 1)
            silent = (mine <= 0).expand(b, h, g, r).reshape(b * h, g * r, 1)
            largest = mass.mul_(scale).masked_fill_(silent, 0.0).amax(dim=1, keepdim=True)  # the block is used up
            score[..., :visible] = torch.maximum(score[..., :visible], largest)
        else:
            score[..., :visible] += (mine / block.total).view(b * h, 1, g * r) @ mass
        start += r
    return score.view(b, h, -1) * observation.valid


def query_weights(observation: Observation) -> Float[Tensor, "b q"]:
    """1 for every query that exists, 0 for missing ones."""
    return observation.query_valid.float()


def slots_of(flags: Bool[Tensor, "... t"]) -> Int[Tensor, "... n"]:
    """The slots of True, in order, and some others behind them where a head has fewer."""
    most = int(flags.sum(dim=-1).max())
    return flags.sort(dim=-1, descending=True, stable=True).indices[..., :most]
