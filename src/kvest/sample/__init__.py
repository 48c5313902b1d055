"""Designs: which entries stay, with what probability?  `Proposal, counts -> Draw`. One a file, one line here."""

from kvest.sample._base import Design
from kvest.sample.best_of import BestOf
from kvest.sample.clusters import Clusters
from kvest.sample.pareto import Pareto
from kvest.sample.pivotal import Pivotal
from kvest.sample.poisson import Poisson
from kvest.sample.stratified import Stratified
from kvest.sample.systematic import Systematic
from kvest.sample.top_k import TopK
from kvest.sample.with_replacement import WithReplacement

__all__ = [
    "DESIGNS",
    "BestOf",
    "Clusters",
    "Design",
    "Pareto",
    "Pivotal",
    "Poisson",
    "Stratified",
    "Systematic",
    "TopK",
    "WithReplacement",
]

DESIGNS: dict[str, type[Design]] = {
    "top_k": TopK,
    "poisson": Poisson,
    "systematic": Systematic,
    "stratified": Stratified,
    "with_replacement": WithReplacement,
    "pareto": Pareto,
    "pivotal": Pivotal,
    "clusters": Clusters,
    "best_of": BestOf,
}
