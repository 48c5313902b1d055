"""ChunkKV: neighbouring entries are worth the same, and stay or go together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvest.neighbours import groups, sums
from kvest.propose._base import at_least
from kvest.propose._wrapper import Wrapper
from kvest.propose.last_query import over_heads
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Chunked(Wrapper):
    """score_i = mean of x over the entries of i's chunk: positions n size ... (n + 1) size - 1

    x is the score of `proposal`, averaged over all heads of the layer by position (`layer=False`: the head's own).
    `top_k` then keeps whole chunks, but for sinks and window, which stay anyway, and for the last chunk, of which the
    budget may leave only the most recent part. Random designs draw entries: `clusters(DESIGN, 20)` draws chunks.
    Source: ChunkKV, arXiv:2502.00299.
    Unlike the paper: chunks are counted from position 0 of each row, and in later rounds a chunk is what the head still
    holds of it.
    """

    size: int = 20
    layer: bool = True

    def __post_init__(self) -> None:
        at_least(1, size=self.size)

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        score = over_heads(observation, inner.score) if self.layer else inner.score
        valid, group = observation.valid, groups(observation.positions, self.size)
        mean = sums(score, group) / sums(valid.float(), group).clamp_min(1.0)
        return replace(inner, score=mean.gather(-1, group).masked_fill(~valid, 0.0))
