"""Allocations: how many entries may each head keep?  `Proposals, budget -> counts`. One a file, one line here."""

from kvest.allocate._base import Allocate
from kvest.allocate.one_threshold import OneThreshold
from kvest.allocate.uniform import UniformAllocation

__all__ = [
    "ALLOCATIONS",
    "Allocate",
    "OneThreshold",
    "UniformAllocation",
]

ALLOCATIONS: dict[str, type[Allocate]] = {
    "uniform": UniformAllocation,
    "one_threshold": OneThreshold,
}
