"""Designs: which entries stay, with what probability?  `Proposal, counts -> Draw`. One a file, one line here."""

from kvest.sample._base import Design
from kvest.sample.poisson import Poisson
from kvest.sample.systematic import Systematic
from kvest.sample.top_k import TopK
from kvest.sample.with_replacement import WithReplacement

__all__ = [
    "DESIGNS",
    "Design",
    "Poisson",
    "Systematic",
    "TopK",
    "WithReplacement",
]

DESIGNS: dict[str, type[Design]] = {
    "top_k": TopK,
    "poisson": Poisson,
    "systematic": Systematic,
    "with_replacement": WithReplacement,
}
