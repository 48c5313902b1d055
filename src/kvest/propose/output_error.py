"""Output error: how far the output moves if an entry is missing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.observe import blocks, by_head
from kvest.propose._base import Propose, at_least, last, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class OutputError(Propose):
    """score_i = mean_{g, j} p_j(i) norm(v_i - o_j) / norm(o_j),  o_j = sum_i p_j(i) v_i

    j: `rows` reference queries at log-uniform distances from the end, each of which sees the whole prompt.
    Removing entry i alone moves o_j by p_j(i) / (1 - p_j(i)) norm(v_i - o_j). Source: ours; least attention error, but
    not least KL.
    """

    rows: int = 128

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows)

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, observation.queries.shape[3])
        chosen = log_uniform(newest, self.rows)
        slots = chosen.any(dim=0).nonzero()[:, 0]
        count = chosen.sum(dim=1).clamp_min(1)
        total = by_head(newest, lambda part, rows: _moved(part, slots, chosen[rows]))
        return propose_score(observation, total / count[:, None, None])


def _moved(observation: Observation, slots: Int[Tensor, "r"], chosen: Bool[Tensor, "b q"]) -> Float[Tensor, "b h t"]:
    """The sum over the chosen queries (each row its own), averaged over the group."""
    b, h, g, _, _ = observation.queries.shape
    values = observation.values.float()
    squares = values.square().sum(-1)
    total = torch.zeros_like(squares)
    for block in blocks(observation, slots, causal=False):
        r = block.mass.shape[3]
        p = block.probabilities.view(b, h, g * r, -1)
        outputs = p @ values
        norms = outputs.square().sum(-1, keepdim=True)
        distance = outputs @ values.transpose(2, 3)  # in place from here: it is as large as the block
        distance.mul_(-2.0).add_(squares[:, :, None]).add_(norms).clamp_min_(0.0).sqrt_().mul_(p)
        mine = chosen[:, block.slots].float()[:, None, None].expand(b, h, g, r).reshape(b, h, 1, g * r)
        total += ((mine / norms.sqrt().clamp_min(1e-20).transpose(2, 3)) @ distance)[:, :, 0] / g
    return total


def log_uniform(observation: Observation, rows: int) -> Bool[Tensor, "b q"]:
    """At most `rows` queries of each row, at log-uniform distances from its last one: its own, whatever the batch."""
    exponents = torch.linspace(0, 1, rows, device=observation.queries.device, dtype=torch.float64)
    distance = (observation.query_lengths[:, None].double() ** exponents).round().long().clamp_min(1)
    valid = observation.query_valid
    return torch.zeros_like(valid).scatter_(1, valid.shape[1] - distance, True) & valid
