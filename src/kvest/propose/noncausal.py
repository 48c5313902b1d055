"""Non-causal attention: what a chunk of the prompt attends to within itself, later entries included."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import avg_pool1d, pad

from kvest.observe import attended
from kvest.propose._base import Propose, at_least, last, propose_score, value_norms
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class NonCausal(Propose):
    """score_i = norm(v_i) sum_{j in C(i)} mean_g p_j(i),  p_j = softmax over the entries of C(i), without causal mask

    C(i) is the chunk of `chunk` positions that i lies in, counted from the row's first token; j are its queries. No
    entry is favoured for being early, and the cost grows with t only.
    In later rounds there are queries since the last round only. Entries of chunks that have none any more belong to the
    oldest chunk that has some, whose queries did see them.

    Source: Compactor, arXiv:2507.08143.
    `peer=True`: as kvpress 0.5.5. Logits lack the factor 1/sqrt(d); a shorter last chunk is filled up by tokens whose
    logits are 0, which attend and are attended to (its mask is -1e-9); scores are averaged over 3 neighbours, of which
    those beyond the ends count 0.
    """

    chunk: int = 256
    peer: bool = False
    attends = True

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk)

    @property
    def queries(self) -> int | None:
        return None

    def __call__(self, observation: Observation) -> Proposal:
        newest = last(observation, observation.queries.shape[3])
        newest = replace(newest, scale=1.0) if self.peer else newest
        score = torch.zeros_like(newest.log_weights, dtype=torch.float32)
        t = score.shape[2]
        for row, (seen, asked) in enumerate(zip(newest.seen.tolist(), newest.query_lengths.tolist(), strict=True)):
            start, first = seen - asked, True
            while start < seen:
                stop = min(seen, (start // self.chunk + 1) * self.chunk)
                entries = slice(0 if first else t - seen + start, t - seen + stop)
                part = _cut(newest, row, entries, stop - start)
                padding = -stop % self.chunk if self.peer else 0
                part = _filled(part, padding) if padding else part
                summed = attended(part, part.query_valid.float(), causal=False) + padding / self.chunk
                score[row : row + 1, :, entries] = summed[:, :, : entries.stop - entries.start]
                start, first = stop, False
        score = score * value_norms(observation)
        if self.peer:
            score = avg_pool1d(score.masked_fill(~observation.valid, 0.0), 3, stride=1, padding=1)
        return propose_score(observation, score)


def _cut(observation: Observation, row: int, entries: slice, asked: int) -> Observation:
    """One row's entries in these slots, and the queries of the last `asked` of them."""
    one, t = slice(row, row + 1), observation.keys.shape[2]
    after = t - entries.stop
    q = observation.queries.shape[3] - after
    lengths = (observation.lengths[one] - after).clamp(0, entries.stop - entries.start)
    wide = ("keys", "values", "log_weights", "positions")
    cut = {name: getattr(observation, name)[one, :, entries] for name in wide}
    return replace(
        observation,
        queries=observation.queries[one, :, :, q - asked : q],
        query_lengths=torch.full_like(observation.query_lengths[one], asked),
        lengths=lengths,
        seen=observation.seen[one] - after,
        history=None,
        prepared=None,
        normalizers=None,
        **cut,
        **{name: getattr(observation, name)[one] for name in ("budget", "due")},
    )


def _filled(observation: Observation, padding: int) -> Observation:
    """One more entry, of logit 0 for every query, that stands for `padding` of them."""
    return replace(
        observation,
        keys=pad(observation.keys, (0, 0, 0, 1)),
        values=pad(observation.values, (0, 0, 0, 1)),
        log_weights=pad(observation.log_weights, (0, 1), value=math.log(padding)),
        positions=pad(observation.positions, (0, 1)),
        lengths=observation.lengths + 1,
    )
