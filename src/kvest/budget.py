"""Budgets: how much may be kept, with a unit.

`Fraction(0.25)` keeps a quarter of the tokens seen (others call that a compression ratio of 0.75), `Entries(2048)`
that many entries per KV head, `Bytes("512MiB")` what fits into that many bytes over the whole cache.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Footprint:
    """What the bytes of a whole cache are made of: `entry_bytes` summed over the heads of all evicted layers (keys,
    values, weights, positions of one entry in each), `fixed_bytes` that eviction cannot change (bounded layers, what a
    stand-in holds besides entries)."""

    entry_bytes: int
    fixed_bytes: int
    rows: int


@dataclass(frozen=True)
class Fraction:
    """Keep this share of the tokens seen; never less than sinks and window."""

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(
                f"keep must be in (0, 1], not {self.keep!r}: it is the share that stays "
                "(a compression ratio of 0.75 is keep=0.25)"
            )

    def entries(self, seen: int, protected: int, footprint: Footprint) -> int:
        return max(math.floor(self.keep * seen + 1e-9), protected)  # 1e-9: 0.29 * 100 is 28.999999999999996

    def __str__(self) -> str:
        return repr(float(self.keep))


@dataclass(frozen=True)
class Entries:
    """Keep this many entries per KV head, sinks and window included."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"a budget of entries must be a whole number of at least 1, not {self.count!r}")

    def entries(self, seen: int, protected: int, footprint: Footprint) -> int:
        if self.count < protected:
            raise ValueError(
                f"a budget of {self.count} entries per head cannot hold the {protected} of sinks and window: "
                f"raise it to at least {protected}, or lower sinks= and window="
            )
        return self.count

    def __str__(self) -> str:
        return str(self.count)


@dataclass(frozen=True)
class Bytes:
    """Keep what fits into this many bytes: the whole cache, all rows, weights and positions included.

    Designs of random size hold it on average; under `every=N` the N entries until the next eviction come on top.
    """

    size: int

    def __init__(self, size: int | str) -> None:
        object.__setattr__(self, "size", self.read(size) if isinstance(size, str) else int(size))
        if self.size < 1:
            raise ValueError(f"a budget of bytes must be positive, not {size!r}")

    @staticmethod
    def read(text: str) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", text, re.IGNORECASE)
        if match is None:
            raise ValueError(f"cannot read {text!r} as a number of bytes: write it like 512MiB, 2GB or 1048576B")
        return int(float(match[1]) * _UNITS[match[2].upper()])

    def entries(self, seen: int, protected: int, footprint: Footprint) -> int:
        free = self.size - footprint.fixed_bytes
        count = free // (footprint.entry_bytes * footprint.rows)
        if count < min(protected, seen):
            least = footprint.fixed_bytes + footprint.entry_bytes * footprint.rows * min(protected, seen)
            raise ValueError(
                f"{self} cannot hold sinks and window of this cache: the least possible is {least} bytes "
                f"({footprint.fixed_bytes} of them in layers that are not evicted)"
            )
        return count

    def __str__(self) -> str:
        for unit in ("GiB", "MiB", "KiB"):
            if self.size % _UNITS[unit.upper()] == 0:
                return f"{self.size // _UNITS[unit.upper()]}{unit}"
        return f"{self.size}B"


Budget = Fraction | Entries | Bytes


def read_budget(text: str) -> Budget:
    """`0.25` is a fraction, `2048` entries, `512MiB` bytes. `1` is one entry; write `1.0` for everything."""
    text = text.strip()
    if re.fullmatch(r"\d+", text):
        return Entries(int(text))
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=e))(e[+-]?\d+)?", text, re.IGNORECASE):
        return Fraction(float(text))
    return Bytes(text)
