"""Recall: what is gone is kept elsewhere, and asked again when queries have moved."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvest.stand_in._base import StandIn
from kvest.types import Draw, Elsewhere, Gone, Kept, Observation

_TENSORS = ("keys", "values", "log_weights")


@dataclass(frozen=True)
class Recall(StandIn):
    """f_E(q) = sum_{i in E} a_i(q) v_i / Z_E(q),   Z_E(q) = sum_{i in E} a_i(q),   merged by mass with what is kept

    E are the entries that are gone. They are brought back, and f_E and Z_E computed, for a query of which
    cos(q, q_ref) < `below` in any query head of the KV head; it is their q_ref from then on. While cos > `reuse` their
    last answer (f_E(q_ref), Z_E(q_ref)) is merged again; between the two thresholds only what is kept answers. The
    first query after an eviction always brings them back.

    `where="host"` keeps them in the host's memory, `"disk"` in a file that is mapped into memory (in TMPDIR, gone with
    the cache). What the cache holds of its own, and its budget, is the rest; `report()` counts both, and how often how
    many bytes came back. Each pass reads one flag per layer and head from the device.

    Source: CaliDrop, arXiv:2507.19906.
    Unlike the paper: E is asked by the first query of all, and by every query of a later turn that has moved as it does
    while decoding; any policy says what is gone; a head whose query heads disagree brings it back for all of them.
    """

    brings_back: ClassVar[bool] = True

    reuse: float = 0.85
    below: float = 0.70
    where: Literal["host", "disk"] = "host"

    def __post_init__(self) -> None:
        if not -1 <= self.below <= self.reuse <= 1:
            raise ValueError(f"recall needs -1 <= below <= reuse <= 1, not below={self.below} and reuse={self.reuse}")
        if self.where not in ("host", "disk"):
            raise ValueError(f"recall keeps what is gone on where='host' or where='disk', not {self.where!r}")

    def __call__(
        self, draw: Draw, log_weights: Float[Tensor, "b h t"], observation: Observation, room: Int[Tensor, "b h"]
    ) -> Kept:
        evicted = observation.valid & ~draw.keep
        before = observation.elsewhere
        found = self.away(_gone(observation, evicted))
        parts = [() if before is None else before.gone[row] for row in range(len(found))]
        joined = tuple(old + ((new,) if len(new.keys) else ()) for old, new in zip(parts, found, strict=True))
        if before is None:
            return Kept(observation, log_weights, elsewhere=Elsewhere(joined, self.reuse, self.below))
        last = before.last
        if last is not None:  # heads that let go of more must be asked anew
            last = replace(last, known=last.known & ~evicted.any(dim=-1))
        return Kept(observation, log_weights, elsewhere=replace(before, gone=joined, last=last))

    def away(self, parts: list[Gone]) -> list[Gone]:
        """The same, out of the device's memory."""
        tensors = {f"{i}.{name}": getattr(part, name) for i, part in enumerate(parts) for name in _TENSORS}
        held = _on_disk(tensors) if self.where == "disk" else _on_host(tensors)
        return [
            Gone(**{name: held[f"{i}.{name}"] for name in _TENSORS}, counts=part.counts) for i, part in enumerate(parts)
        ]


def _gone(observation: Observation, evicted: Bool[Tensor, "b h t"]) -> list[Gone]:
    """The evicted entries of every row, head after head."""
    counts = evicted.sum(dim=-1).tolist()
    return [
        Gone(**{name: getattr(observation, name)[row][mine].detach() for name in _TENSORS}, counts=tuple(counts[row]))
        for row, mine in enumerate(evicted)
    ]


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In memory that a device can read from while it computes, where there is one."""
    return {name: x if x.is_cpu else x.cpu().pin_memory() for name, x in tensors.items()}


def _on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mapped from a file that nobody else can name, and that ends with the last tensor of it."""
    handle, name = tempfile.mkstemp(prefix="kvest-recall-", suffix=".safetensors")
    os.close(handle)
    try:
        save_file({key: x.contiguous().cpu() for key, x in tensors.items()}, name)
        return load_file(name)
    finally:
        Path(name).unlink(missing_ok=True)
