"""Attention over what was evicted and is kept elsewhere, merged by mass with attention over what is held."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from kvest.attend.dense import BLOCK_ELEMENTS, weighted_and_mass
from kvest.types import Elsewhere, Gone, Recollection


def merge(
    held: Float[Tensor, "b h g q e"],
    held_mass: Float[Tensor, "b h g q"],
    gone: Float[Tensor, "b h g q e"],
    gone_mass: Float[Tensor, "b h g q"],
) -> tuple[Float[Tensor, "b h g q e"], Float[Tensor, "b h g q"]]:
    """(attention over both sets of entries, its log mass), from those over each."""
    share = torch.sigmoid(gone_mass - held_mass)[..., None]
    return held + share * (gone - held), torch.logaddexp(held_mass, gone_mass)


def answer(
    elsewhere: Elsewhere,
    queries: Float[Tensor, "b h g q d"],
    width: int,
    scale: float,
    exists: Bool[Tensor, "b q"] | None,
) -> tuple[Float[Tensor, "b h g q e"], Float[Tensor, "b h g q"], Elsewhere]:
    """(attention over the evicted entries, its log mass, what is remembered from now on), query after query.

    Where a query is between the thresholds the log mass is -inf. `width` is that of the values. Queries whose `exists`
    is False change nothing.
    """
    b, h, g, q, _ = queries.shape
    last = elsewhere.last if elsewhere.last is not None else _unknown(queries, width)
    fetched, source, used, reference = _decide(elsewhere, last, normalize(queries.float(), dim=-1), exists)
    outputs = torch.cat([last.output[:, :, :, None], last.output.new_zeros(b, h, g, q, width)], dim=3)
    masses = torch.cat([last.log_mass[..., None], last.log_mass.new_full((b, h, g, q), -torch.inf)], dim=3)
    times = size = 0
    for row, heads in enumerate(fetched.tolist()):
        for head, flags in enumerate(heads):
            columns = [j for j, flag in enumerate(flags) if flag]
            if columns:
                found, nbytes = _over(elsewhere.gone[row], head, queries[row, head][:, columns], scale)
                where = torch.tensor(columns, device=queries.device) + 1
                outputs[row, head, :, where], masses[row, head, :, where] = found[..., :-1], found[..., -1]
                times, size = times + len(columns), size + nbytes * len(columns)
    rows, kv, groups = (torch.arange(n, device=queries.device) for n in (b, h, g))
    pick = rows[:, None, None, None], kv[:, None, None], groups[:, None], source[:, :, None]
    output, log_mass = outputs[pick], masses[pick]
    remembered = Recollection(reference, output[..., -1, :], log_mass[..., -1], last.known | fetched.any(dim=-1))
    new = replace(elsewhere, last=remembered, times=elsewhere.times + times, nbytes=elsewhere.nbytes + size)
    return output, log_mass.masked_fill(~used, -torch.inf), new


def _unknown(queries: Float[Tensor, "b h g q d"], width: int) -> Recollection:
    b, h, g, _, d = queries.shape
    zeros = queries.new_zeros(b, h, g, d + width, dtype=torch.float32)
    known = torch.zeros(b, h, dtype=torch.bool, device=queries.device)
    return Recollection(zeros[..., :d], zeros[..., d:], zeros.new_full((b, h, g), -torch.inf), known)


def _decide(
    elsewhere: Elsewhere, last: Recollection, units: Float[Tensor, "b h g q d"], exists: Bool[Tensor, "b q"] | None
) -> tuple[Bool[Tensor, "b h q"], Int[Tensor, "b h q"], Bool[Tensor, "b h g q"], Float[Tensor, "b h g d"]]:
    """(who brings back for which query, whose answer it gets: 0 the last one, else query + 1, whether it is used, the
    new reference)."""
    b, h, _, q, _ = units.shape
    there = torch.tensor(
        [[any(part.counts[head] for part in parts) for head in range(h)] for parts in elsewhere.gone],
        device=units.device,
    )
    reference, known = last.reference, last.known
    source = torch.zeros(b, h, dtype=torch.int64, device=units.device)
    fetched, sources, used = [], [], []
    for j in range(q):
        unit = units[:, :, :, j]
        similar = (unit * reference).sum(dim=-1)
        fetch = there & (~known | (similar < elsewhere.below).any(dim=-1))
        if exists is not None:
            fetch = fetch & exists[:, j, None]
        reference = torch.where(fetch[..., None, None], unit, reference)
        source = source.masked_fill(fetch, j + 1)
        known = known | fetch
        fetched.append(fetch)
        sources.append(source)
        used.append((fetch[..., None] | (similar > elsewhere.reuse)) & known[..., None])
    return torch.stack(fetched, dim=-1), torch.stack(sources, dim=-1), torch.stack(used, dim=-1), reference


def _over(
    parts: tuple[Gone, ...], head: int, queries: Float[Tensor, "g n d"], scale: float
) -> tuple[Float[Tensor, "g n w"], int]:
    """(attention of some queries over what one head let go of, its log mass behind it; bytes brought back)."""
    g, n, d = queries.shape
    flat = queries.reshape(1, 1, g * n, d)
    out = mass = None
    size = 0
    for part in parts:
        start, count = sum(part.counts[:head]), part.counts[head]
        if count == 0:
            continue
        keys, values = (x[start : start + count].to(flat.device, non_blocking=True) for x in (part.keys, part.values))
        bias = part.log_weights[start : start + count].to(flat.device, non_blocking=True)
        size += keys.nbytes + values.nbytes
        blocks = torch.split(flat, max(1, BLOCK_ELEMENTS // count), dim=2)
        found = torch.cat(
            [weighted_and_mass(x, keys[None, None], values[None, None], bias[None, None, None], scale) for x in blocks],
            dim=2,
        ).view(1, 1, g, n, -1)
        one, its = found[..., :-1], found[..., -1]
        out, mass = (one, its) if out is None or mass is None else merge(out, mass, one, its)
    assert out is not None
    assert mass is not None
    return torch.cat([out, mass[..., None]], dim=-1)[0, 0], size
