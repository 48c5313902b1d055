"""A take-all stratum: the entries that another criterion ranks first stay for sure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvest.propose._base import Propose
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class WithCertain(Propose):
    """The score of `proposal`; the floor(share * budget) entries that `by` ranks first are certain to stay

    Sinks and window come on top of that share, and are not counted in it; nor is what `proposal` is certain of.
    Novelty (`by=keydiff`) guards what nobody has asked for yet, attention samples the rest: continuation and retrieval
    want different entries. Source: ours.
    """

    proposal: Propose
    by: Propose
    share: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"with_certain needs 0 <= share <= 1, not {self.share!r}")

    @property
    def queries(self) -> int | None:
        needs = (self.proposal.queries, self.by.queries)
        return None if None in needs else max(n for n in needs if n is not None)

    @property
    def carries(self) -> bool:  # type: ignore[override]  # the sampled proposal's
        return self.proposal.carries

    @property
    def deterministic_only(self) -> bool:  # type: ignore[override]  # the sampled proposal's
        return self.proposal.deterministic_only

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]  # either's
        return self.proposal.needs_rotation or self.by.needs_rotation

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        taken = observation.protected | inner.certain
        by = self.by(observation).score
        if not torch.isfinite(by).all():  # the policy reports it, as for the sampled proposal
            return replace(inner, score=by)
        rank = by.masked_fill(taken | observation.made | ~observation.valid, -1.0)
        share = (self.share * observation.budget.double() + 1e-9).floor().long()
        room = observation.budget[:, None] - taken.sum(dim=-1)
        count = torch.minimum(share[:, None], room.clamp_min(0))
        order = rank.argsort(dim=-1, descending=True, stable=True)
        first = torch.arange(rank.shape[-1], device=rank.device) < count[..., None]
        certain = torch.zeros_like(inner.certain).scatter_(-1, order, first) & (rank >= 0)
        return replace(inner, certain=inner.certain | certain)
