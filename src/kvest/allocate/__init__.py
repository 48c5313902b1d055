"""Allocations: how many entries may each head keep?  `Proposals, budget -> counts`. One a file, one line here."""

from kvest.allocate._base import Allocate
from kvest.allocate.adaptive import Adaptive
from kvest.allocate.lava import LavaAllocation
from kvest.allocate.one_threshold import OneThreshold
from kvest.allocate.pyramid import Pyramid
from kvest.allocate.uniform import UniformAllocation

__all__ = [
    "ALLOCATIONS",
    "Adaptive",
    "Allocate",
    "LavaAllocation",
    "OneThreshold",
    "Pyramid",
    "UniformAllocation",
]

ALLOCATIONS: dict[str, type[Allocate]] = {
    "uniform": UniformAllocation,
    "one_threshold": OneThreshold,
    "pyramid": Pyramid,
    "adaptive": Adaptive,
    "lava": LavaAllocation,
}
