"""Attention over a `Store`: heads that hold different numbers of entries, exact ones among them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvest.attend import recalled
from kvest.attend.dense import (
    BLOCK_ELEMENTS,
    weighted,
    weighted_and_mass,
    weighted_with_sinks,
    weighted_with_slopes,
)
from kvest.retain import Run, Store
from kvest.types import Elsewhere


def attend(
    queries: Float[Tensor, "b hg q d"],
    store: Store,
    scale: float,
    exists: Bool[Tensor, "b q"] | None = None,
    sinks: Float[Tensor, "hg"] | None = None,
) -> Float[Tensor, "b hg q e"]:
    """Attention of the latest queries over everything that `store` holds, their own entries included.

    The `q` newest entries of each head were written by the queries: each sees those before it and itself. Where
    `exists` is False the query is padding, wrote nothing, and its output means nothing. Heads with equal storage are
    computed together. `sinks` are learned logits without a value, one per query head, in each softmax.
    """
    b, heads, q, d = queries.shape
    g = heads // store.heads
    if queries.dtype != store.keys.dtype:  # autocast
        return attend(queries.to(store.keys.dtype), store, scale, exists, sinks).to(queries.dtype)
    if store.elsewhere is not None:
        return _with_recall(queries.view(b, store.heads, g, q, d), store, store.elsewhere, scale, exists, sinks)
    learned = None if sinks is None else sinks.view(store.heads, g).repeat(b, 1)
    return _over_held(queries, store, scale, exists, learned)


def _over_held(
    queries: Float[Tensor, "b hg q d"],
    store: Store,
    scale: float,
    exists: Bool[Tensor, "b q"] | None,
    sinks: Float[Tensor, "bh g"] | None,
) -> Float[Tensor, "b hg q w"]:
    """Over what is held; with what is held elsewhere, the log mass stands behind each output."""
    b, heads, q, d = queries.shape
    g = heads // store.heads
    if q == 1:
        return _one_query(queries.reshape(1, b * store.heads, g, d), store, scale, sinks).view(b, heads, 1, -1)
    flat = queries.reshape(b * store.heads, g, q, d)
    parts = [_many_queries(flat[run.heads], store, run, scale, exists, sinks) for run in store.runs()]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(b, heads, q, -1)


def _with_recall(
    queries: Float[Tensor, "b h g q d"],
    store: Store,
    elsewhere: Elsewhere,
    scale: float,
    exists: Bool[Tensor, "b q"] | None,
    sinks: Float[Tensor, "hg"] | None,
) -> Float[Tensor, "b hg q e"]:
    """Over what is held and what was evicted, as far as it is brought back."""
    b, h, g, q, _ = queries.shape
    held = _over_held(queries.flatten(1, 2), store, scale, exists, None).view(b, h, g, q, -1)
    gone, mass, store.elsewhere = recalled.answer(elsewhere, queries, held.shape[-1] - 1, scale, exists)
    out, total = recalled.merge(held[..., :-1], held[..., -1], gone, mass)
    if sinks is not None:
        out = out * torch.sigmoid(total - sinks.float().view(h, g, 1))[..., None]
    return out.flatten(1, 2).to(queries.dtype)


def _one_query(
    queries: Float[Tensor, "1 bh g d"], store: Store, scale: float, sinks: Float[Tensor, "bh g"] | None
) -> Float[Tensor, "1 bh g e"]:
    """A decode step, in as few calls as there can be: each costs as much as 100 entries on a CPU."""
    runs = store.runs()
    if len(runs) == 1:
        run = runs[0]
        return _over(queries, store, run, run.bias, scale, None if sinks is None else sinks[None])
    each = torch.split(queries, store.run_sizes, dim=1)
    return torch.cat(
        [
            _over(part, store, run, run.bias, scale, None if sinks is None else sinks[None, run.heads])
            for part, run in zip(each, runs, strict=True)
        ],
        dim=1,
    )


def _over(
    queries: Float[Tensor, "1 k q d"],
    store: Store,
    run: Run,
    bias: Float[Tensor, "1 k #q c"],
    scale: float,
    sinks: Float[Tensor, "1 k q"] | None,
) -> Float[Tensor, "1 k q e"]:
    if store.elsewhere is not None:
        return weighted_and_mass(queries, run.keys, run.values, bias, scale)
    if run.slopes is not None:
        return weighted_with_slopes(queries, run.keys, run.values, bias, scale, run.slopes, sinks)
    if sinks is None:
        return weighted(queries, run.keys, run.values, bias, scale)
    return weighted_with_sinks(queries, run.keys, run.values, bias, scale, sinks)


def _many_queries(
    queries: Float[Tensor, "k g q d"],
    store: Store,
    run: Run,
    scale: float,
    exists: Bool[Tensor, "b q"] | None,
    sinks: Float[Tensor, "bh g"] | None,
) -> Float[Tensor, "k g q e"]:
    k, g, q, _ = queries.shape
    device = queries.device
    capacity = run.keys.shape[2]
    lengths = torch.tensor(store.lengths[run.heads], device=device)
    if exists is None:
        last = lengths[:, None] - q + torch.arange(q, device=device)
    else:
        row = torch.arange(run.heads.start, run.heads.stop, device=device) // store.heads
        own = exists.cumsum(dim=1)
        last = lengths[:, None] + (own - own[:, -1:] - 1)[row]
    slots = torch.arange(capacity, device=device)
    keys, values = (x[0, :, None].expand(k, g, -1, -1) for x in (run.keys, run.values))
    rows = max(1, BLOCK_ELEMENTS // (k * capacity))
    parts = []
    for start in range(0, q, rows):
        some = slice(start, start + rows)
        bias = run.bias[0].masked_fill(slots > last[:, some, None], -torch.inf)
        if queries.is_cpu:
            mine = queries[:, :, some], keys, values, bias[:, None], scale
            if store.elsewhere is not None:
                parts.append(weighted_and_mass(*mine))
            elif run.slopes is not None:
                learned = None if sinks is None else sinks[run.heads, :, None]
                parts.append(weighted_with_slopes(*mine, run.slopes[0, :, None], learned))
            elif sinks is None:
                parts.append(weighted(*mine))
            else:
                parts.append(weighted_with_sinks(*mine, sinks[run.heads, :, None]))
        else:  # matmuls would copy the keys for every query head of a group: queries of a group stand together
            packed = queries[:, :, some].reshape(1, k, -1, queries.shape[-1])
            learned = None if sinks is None else sinks[None, run.heads].repeat_interleave(bias.shape[1], dim=2)
            out = _over(packed, store, run, bias.repeat(1, g, 1)[None], scale, learned)
            parts.append(out.view(k, g, -1, out.shape[-1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
