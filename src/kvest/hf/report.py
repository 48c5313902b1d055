"""What a cache holds, counted from the storages that are really there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvest.hf import elsewhere
from kvest.hf.branch import Mark
from kvest.hf.layer import EvictionLayer
from kvest.hf.session import Session
from kvest.retain import Run, Store
from kvest.types import Elsewhere, Recollection


@dataclass(frozen=True)
class Report:
    """`seen` real tokens per row; `kept[l, b, h]` entries held, exact tail included, for every layer of the model
    (bounded layers report their window, layers without keys 0).

    `kept_bytes` counts every storage that the cache holds: keys, values, weights, positions, room to append, and what a
    later eviction needs. `full_bytes` is what a stock cache would hold for the tokens seen. `positions[l][b][h]`
    (ascending) and `log_weights[l][b][h]` are 1-D tensors; entries that are exact have log weight 0, entries that were
    made to stand in for evicted ones have position -1. `evictions` counts the rounds per row, `evicted_layers` the
    layers that take part. With `recall`, `elsewhere_bytes` are those of evicted entries on the host or on disk (no part
    of `kept_bytes`), `recalls` how often a head's were brought back, `recalled_bytes` how many bytes came.
    """

    policy: str
    seed: int
    seen: Int[Tensor, "b"]
    kept: Int[Tensor, "l b h"]
    kept_bytes: int
    full_bytes: int
    positions: list[list[list[Tensor]]]
    log_weights: list[list[list[Tensor]]]
    evictions: list[int]
    evicted_layers: list[int]
    elsewhere_bytes: int = 0
    recalls: int = 0
    recalled_bytes: int = 0

    @property
    def kept_whole(self) -> bool:
        """Whether nothing was evicted: the prompt was shorter than the budget, or no prompt was read yet."""
        return not any(self.evictions)

    @property
    def made(self) -> Int[Tensor, "l b h"]:
        """How many of the kept entries were made to stand in for evicted ones."""
        made = torch.zeros_like(self.kept)
        for index, layer in enumerate(self.positions):
            for row, heads in enumerate(layer):
                for head, where in enumerate(heads):
                    made[index, row, head] = int((where < 0).sum())
        return made

    def __str__(self) -> str:
        if self.kept.numel() == 0:
            return f"policy       {self.policy}\nseen         nothing yet"
        kept = self.kept[self.evicted_layers].double()
        share = kept.mean() / self.seen.double().mean().clamp_min(1)
        low, high = int(kept.min()), int(kept.max())
        spread = f" (from {low} to {high} over heads)" if low != high else ""
        made = self.made[self.evicted_layers].double().mean()
        spread += f", {made:.0f} of them made" if made > 0 else ""
        lines = [
            ("policy", self.policy),
            ("tokens seen", ", ".join(str(n) for n in self.seen.tolist())),
            ("entries kept", f"{kept.mean():.0f} per head{spread}, {share:.1%} of the tokens"),
            (
                "bytes held",
                f"{_bytes(self.kept_bytes)} of {_bytes(self.full_bytes)} ({self.kept_bytes / self.full_bytes:.1%})",
            ),
            ("evictions", "none: within the budget, kept whole" if self.kept_whole else str(max(self.evictions))),
        ]
        if self.elsewhere_bytes:
            lines.append(("elsewhere", f"{_bytes(self.elsewhere_bytes)} of evicted entries"))
            lines.append(("brought back", f"{self.recalls:,} times by a head, {_bytes(self.recalled_bytes)}"))
        return "\n".join(f"{name:<13}{text}" for name, text in lines)


def _bytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def make_report(layers: list[Any], session: Session) -> Report:
    """Read everything from the layers; copies positions and weights to the CPU."""
    rows = len(session.seen)
    each = [_layer(layer, rows, session) for layer in layers]
    heads = max((len(row) for positions, _ in each for row in positions), default=0)
    kept = torch.zeros(len(layers), rows, heads, dtype=torch.int64)
    for index, (positions, _) in enumerate(each):
        for row, by_head in enumerate(positions):
            for head, where in enumerate(by_head):
                kept[index, row, head] = len(where)
    stores = [layer.store for layer in layers if isinstance(layer, EvictionLayer) and layer.store is not None]
    away = [store.elsewhere for store in stores if store.elsewhere is not None]
    return Report(
        policy=str(session.policy),
        seed=session.seed,
        seen=torch.tensor(session.seen, dtype=torch.int64),
        kept=kept,
        kept_bytes=held_bytes(layers, session),
        full_bytes=sum(_full_bytes(layer, session) for layer in layers),
        positions=[positions for positions, _ in each],
        log_weights=[weights for _, weights in each],
        evictions=list(session.rounds),
        evicted_layers=list(session.evictable),
        elsewhere_bytes=sum(elsewhere.nbytes(x) for x in away),
        recalls=sum(x.times for x in away),
        recalled_bytes=sum(x.nbytes for x in away),
    )


def merge(parts: list[Report]) -> Report:
    """One report of all processes that the heads are split over, in the order of their heads."""

    def join(name: str) -> list[list[list[Tensor]]]:
        layers = zip(*(getattr(part, name) for part in parts), strict=True)
        return [[[head for part in row for head in part] for row in zip(*layer, strict=True)] for layer in layers]

    return replace(
        parts[0],
        kept=torch.cat([part.kept for part in parts], dim=2),
        kept_bytes=sum(part.kept_bytes for part in parts),
        full_bytes=sum(part.full_bytes for part in parts),
        positions=join("positions"),
        log_weights=join("log_weights"),
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("elsewhere_bytes", "recalls", "recalled_bytes")
        },
    )


def _layer(layer: Any, rows: int, session: Session) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """(positions, log weights) of one layer, [b][h]."""
    if isinstance(layer, EvictionLayer) and layer.store is not None:
        store = layer.store
        positions = [[store.head(store.positions, b, h).long().cpu() for h in range(store.heads)] for b in range(rows)]
        weights = [
            [store.head(store.log_weights, b, h).to("cpu", copy=True) for h in range(store.heads)] for b in range(rows)
        ]
        return positions, weights
    keys = getattr(layer, "keys", None)
    if keys is None or keys.ndim != 4:
        return [[] for _ in range(rows)], [[] for _ in range(rows)]
    positions = []
    for row in range(rows):
        held = _held(layer, row, session)
        positions.append([torch.arange(session.seen[row] - held, session.seen[row])] * keys.shape[1])
    return positions, [[torch.zeros(len(where)) for where in row] for row in positions]


def _held(layer: Any, row: int, session: Session) -> int:
    """Real tokens in a dense layer: of the columns that it holds, those that are not padding."""
    columns = int(layer.keys.shape[2])
    if session.evicted:  # a bounded layer, whose columns since then are the latest ones
        return min(columns, session.seen[row])
    if session.exists is None:
        return columns
    return int(session.exists[row, session.exists.shape[1] - columns :].sum())


def _full_bytes(layer: Any, session: Session) -> int:
    """Keys and values of the real tokens that a stock layer would hold."""
    if isinstance(layer, EvictionLayer):
        if not layer.is_initialized:
            return 0
        return sum(session.seen) * layer.token_bytes
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.ndim != 4:
        return sum(x.nbytes for x in _tensors(vars(layer)))
    token = keys.shape[1] * (keys.shape[3] * keys.element_size() + values.shape[3] * values.element_size())
    return token * sum(_held(layer, row, session) for row in range(len(session.seen)))


def held_bytes(layers: list[Any], session: Session) -> int:
    """Bytes of all distinct storages that layers and session hold."""
    storages = {}
    for owner in (*layers, session):
        for tensor in _tensors(vars(owner)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(x: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, stores among them; not those of a session or of the model."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from _tensors(value)
    elif isinstance(x, Store | Run | Mark | Recollection):
        yield from _tensors(vars(x))
    elif isinstance(x, Elsewhere):  # but not what is elsewhere
        yield from _tensors(x.last)
