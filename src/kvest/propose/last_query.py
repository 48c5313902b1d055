"""pi_min and TOVA: what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.observe import attended
from kvest.propose._base import Propose, last, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class LastQuery(Propose):
    """score_i = mean_g p_t(i) norm(v_i)      (t: the last query)

    `values=False` leaves norm(v_i) out; `layer=True` averages p over all heads of the layer, by position (0 in those
    that evicted i). Source: pi_min of A Probabilistic Interpretation of KV Cache Eviction.
    `last_query(values=False, layer=True)` is TOVA, arXiv:2401.06104.
    """

    values: bool = True
    layer: bool = False
    attends = True

    @property
    def queries(self) -> int | None:
        return 1

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, 1)
        weights = torch.ones_like(newest.query_lengths, dtype=torch.float32)[:, None]
        score = attended(newest, weights)
        if self.layer:
            score = over_heads(observation, score)
        return propose_score(observation, score * value_norms(observation) if self.values else score)


def over_heads(observation: Observation, score: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """The mean over all heads of the layer, in whatever process: by position, as heads may hold different entries

    A head that does not hold a position any more counts with 0; a made entry has none, and gets 0.
    """
    b, h, _ = score.shape
    end = int(observation.seen.max())  # one slot more, for what is missing
    tokens = observation.valid & ~observation.made
    where = observation.positions.masked_fill(~tokens, end)
    table = score.new_zeros(b, h, end + 1).scatter_(2, where, score)
    mean = torch.cat(observation.split.gather(table), dim=1).mean(dim=1, keepdim=True)
    return mean.expand(b, h, end + 1).gather(2, where) * tokens
