"""H2O: the attention that an entry has collected."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvest.observe import attended, query_weights
from kvest.propose._base import Propose, last, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class H2O(Propose):
    """score_i = sum_{j >= i} mean_g p_j(i) / #{j >= i}

    The sum runs over all queries so far, block by block; over several rounds it adds up. `divide=False` is the paper's
    plain sum, which favours old entries; `values=True` multiplies by norm(v_i). Under `defensive` both the round's
    queries and the rounds are combined by their maximum, which no number of queries divides.
    Source: H2O, arXiv:2306.14048.
    Unlike the paper: divided by the number of queries that saw the entry, by default.
    """

    values: bool = False
    divide: bool = True
    carries = True
    attends = True

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, observation.queries.shape[3])
        history = attended(newest, query_weights(newest))
        if observation.history is not None:
            combine = torch.maximum if observation.reduction == "max" else torch.add
            history = combine(history, observation.history)
        score = history
        if self.divide and observation.reduction == "mean":
            score = score / (observation.seen[:, None, None] - observation.positions).clamp_min(1)
        if self.values:
            score = score * value_norms(observation)
        return replace(propose_score(observation, score), history=history)
