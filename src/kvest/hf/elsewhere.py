"""What a layer keeps elsewhere: counted, and as a file holds it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from kvest.stand_in import Recall, StandIn
from kvest.types import Elsewhere, Gone, Recollection

_TENSORS = ("keys", "values", "log_weights")


def nbytes(elsewhere: Elsewhere) -> int:
    """Of everything that was evicted, rows that share it counted once."""
    parts = {id(part): part for row in elsewhere.gone for part in row}
    return sum(getattr(part, name).nbytes for part in parts.values() for name in _TENSORS)


def pack(elsewhere: Elsewhere) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(plain values, tensors) of which `unpack` makes it again; names of tensors have dots in them."""
    rows = [[part.counts for part in row] for row in elsewhere.gone]
    tensors = {
        f"gone.{r}.{n}.{name}": getattr(part, name)
        for r, row in enumerate(elsewhere.gone)
        for n, part in enumerate(row)
        for name in _TENSORS
    }
    if elsewhere.last is not None:
        tensors |= {f"last.{f.name}": getattr(elsewhere.last, f.name) for f in fields(Recollection)}
    return {"counts": rows, "times": elsewhere.times, "nbytes": elsewhere.nbytes}, tensors


def unpack(values: dict[str, Any], tensors: dict[str, Tensor], stand_in: StandIn) -> Elsewhere:
    """What `pack` was given, where `stand_in` keeps it."""
    assert isinstance(stand_in, Recall)
    gone = []
    for r, row in enumerate(values["counts"]):
        parts = [
            Gone(**{name: tensors[f"gone.{r}.{n}.{name}"] for name in _TENSORS}, counts=tuple(counts))
            for n, counts in enumerate(row)
        ]
        gone.append(tuple(stand_in.away(parts)))
    last = None
    if "last.known" in tensors:
        last = Recollection(**{f.name: tensors[f"last.{f.name}"] for f in fields(Recollection)})
    found = Elsewhere(tuple(gone), stand_in.reuse, stand_in.below, last)
    return replace(found, times=values["times"], nbytes=values["nbytes"])
