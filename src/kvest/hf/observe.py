"""From what a layer holds to an `Observation`: everything right-aligned, padding in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.hf import compat
from kvest.retain import Store
from kvest.types import Observation

if TYPE_CHECKING:
    from kvest.hf.layer import EvictionLayer


def observe(layer: EvictionLayer, scale: float) -> Observation:
    """All that the layer holds, and the queries since its last eviction."""
    session = layer.session
    step = session.planned()
    device = layer.device
    seen = torch.tensor([n + a for n, a in zip(session.seen, step.added, strict=True)], device=device)
    due = torch.tensor(step.due, device=device)
    exists, watched = session.tail_exists(), step.watched  # on the device of the mask, which may be another
    exists, watched = (None if flags is None else flags.to(device) for flags in (exists, watched))
    if layer.store is None:
        keys, values, log_weights, positions, lengths = _whole(layer.keys, layer.values, seen, exists)
        history = None
    else:
        keys, values, log_weights, positions, lengths, history = _stored(layer.store)
    b, h, t, d = keys.shape
    queries, query_lengths = _queries(layer.queries, watched)
    normalizers, _ = _queries([] if layer.normalizers is None else [layer.normalizers[..., None]], watched)
    if queries is None:
        queries, query_lengths = keys.new_empty(b, layer.query_heads, 0, d), torch.zeros_like(seen)
    heads, q = queries.shape[1:3]
    place = session.evictable.index(layer.index)
    return Observation(
        queries=queries.reshape(b, h, heads // h, q, d),
        keys=keys,
        values=values,
        log_weights=log_weights,
        positions=positions,
        lengths=lengths,
        query_lengths=query_lengths,
        seen=seen,
        budget=torch.where(due, torch.tensor(step.budgets, device=device), t),
        due=due,
        scale=scale,
        sinks=session.policy.sinks,
        window=session.policy.window,
        history=history,
        slopes=None if layer.store is None else layer.store.slopes,
        elsewhere=None if layer.store is None else layer.store.elsewhere,
        normalizers=None if normalizers is None else normalizers.reshape(b, h, heads // h, q),
        prepared=_prepared(layer.prepared, exists),
        layer=place,
        layers=len(session.evictable),
        rotation=session.rotations[layer.index],
        output=_output(layer, heads, h, values.shape[3]) if session.policy.propose.needs_output else None,
        importance=None if session.importance is None else session.importance[place].to(device),
        split=session.share.split,
    )


def _output(layer: EvictionLayer, heads: int, kv_heads: int, width: int) -> Float[Tensor, "h g m e"]:
    """The part of the layer's output projection that each query head goes through."""
    module = layer.module() if layer.module is not None else None
    assert module is not None  # it is computing right now
    output = compat.output_projection(module, heads, width)
    return output.reshape(kv_heads, heads // kv_heads, *output.shape[1:])


def _whole(
    keys: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t e"], seen: Int[Tensor, "b"], exists: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Before the first eviction: every token, exact."""
    b, h, t, _ = keys.shape
    if exists is not None:
        keys, values = align(keys, exists), align(values, exists)
    positions = torch.arange(t, device=keys.device) - (t - seen)[:, None]
    exact = torch.zeros(b, 1, 1, device=keys.device).expand(b, h, t)
    return keys, values, exact, positions[:, None].expand(b, h, t), seen[:, None].expand(b, h)


def _prepared(scores: Float[Tensor, "b h t"] | None, exists: Tensor | None) -> Float[Tensor, "b h t"] | None:
    """As the keys that they belong to."""
    return scores if scores is None or exists is None else align(scores[..., None], exists)[..., 0]


def _stored(store: Store) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """After an eviction: what each head kept and all since, in one padded block."""
    slots, lengths = store.right_aligned()
    missing = torch.arange(slots.shape[2], device=slots.device) < slots.shape[2] - lengths[..., None]
    log_weights = store.log_weights[slots].masked_fill(missing, 0.0)
    history = None if store.history is None else store.history[slots].masked_fill(missing, 0.0)
    positions = store.positions[slots].long()
    return store.keys[slots], store.values[slots], log_weights, positions, lengths, history


def _queries(parts: list[Float[Tensor, "b hg _ d"]], watched: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(queries since each row's last eviction, how many of them each row has)."""
    if not parts:
        return None, torch.empty(0)
    queries = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    b, _, q, _ = queries.shape
    if watched is None:
        return queries, torch.full((b,), q, device=queries.device)
    mine = watched[:, watched.shape[1] - q :]
    lengths = mine.sum(dim=1)
    most = int(lengths.max())  # with padding there may be more columns than entries
    return align(queries, mine)[:, :, q - most :], lengths


def align(x: Float[Tensor, "b h n d"], exists: Bool[Tensor, "b n"]) -> Float[Tensor, "b h n d"]:
    """Move padding to the front of each row, keeping the order of the rest."""
    if bool((exists[:, 1:] >= exists[:, :-1]).all()):
        return x
    order = exists.long().argsort(dim=1, stable=True)
    return x.gather(2, order[:, None, :, None].expand_as(x))
