"""pi_min and TOVA: what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvest.observe import attended
from kvest.propose._base import Propose, last, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class LastQuery(Propose):
    """score_i = mean_g p_t(i) norm(v_i)      (t: the last query)

    `values=False` leaves norm(v_i) out; `layer=True` averages p over all heads of the layer.
    Source: pi_min of A Probabilistic Interpretation of KV Cache Eviction. `last_query(values=False, layer=True)` is
    TOVA, arXiv:2401.06104.
    """

    values: bool = True
    layer: bool = False

    @property
    def queries(self) -> int | None:
        return 1

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, 1)
        weights = torch.ones_like(newest.query_lengths, dtype=torch.float32)[:, None]
        score = attended(newest, weights)
        if self.layer:
            score = score.mean(dim=1, keepdim=True).expand_as(score)
        return propose_score(observation, score * value_norms(observation) if self.values else score)
