"""CriticalKV: attention, and how much of a value the output projection lets through."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.observe import BLOCK_ELEMENTS
from kvest.propose._base import output_of
from kvest.propose._wrapper import Wrapper
from kvest.propose.with_certain import ranked_first
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Critical(Wrapper):
    """score_i = (x_i + eps) mean_g |W_O v_i|_1; the floor(first * budget) entries of largest x are certain to stay

    x is the score of `proposal`, W_O the part of the output projection behind each query head. The two stages bound how
    far the layer's output moves without assuming that x is right about small scores. `eps` is in the units of x, which
    is meant to be a mean attention. Sinks and window come on top of the first stage.
    Source: CriticalKV, arXiv:2502.03805.
    Unlike the paper: heads that compete for their counts all have the same first stage, a share of the budget per head.
    """

    eps: float = 1e-4
    first: float = 0.5
    needs_output = True

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ValueError(f"critical needs eps >= 0, not {self.eps!r}")
        if not 0 <= self.first <= 1:
            raise ValueError(f"critical needs 0 <= first <= 1, not {self.first!r}")

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        if not torch.isfinite(inner.score).all():  # the policy reports it
            return inner
        score = ((inner.score + self.eps) * output_norms(observation)).masked_fill(~observation.valid, 0.0)
        certain = inner.certain | ranked_first(observation, inner.score, inner.certain, self.first)
        return replace(inner, score=score, certain=certain)


def output_norms(observation: Observation) -> Float[Tensor, "b h t"]:
    """mean_g |W_O v_i|_1, float32. Memory: `BLOCK_ELEMENTS` numbers, or one entry's."""
    output = output_of(observation)
    b, h, t, _ = observation.values.shape
    g, m = output.shape[1:3]
    norms = torch.zeros(h, b * t, dtype=torch.float32, device=observation.values.device)
    rows = max(1, BLOCK_ELEMENTS // m)
    for head in range(h):
        values = observation.values[:, head].reshape(b * t, -1)
        for query_head in range(g):
            projection = output[head, query_head].float().T
            for start in range(0, b * t, rows):
                part = values[start : start + rows].float() @ projection
                norms[head, start : start + rows] += part.abs_().sum(dim=-1) / g  # faster than vector_norm
    return norms.view(h, b, t).transpose(0, 1)
