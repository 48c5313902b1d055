"""A take-all stratum: the entries that another criterion ranks first stay for sure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvest.propose._base import Propose
from kvest.propose._wrapper import Wrapper
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class WithCertain(Wrapper):
    """The score of `proposal`; the floor(share * budget) entries that `by` ranks first are certain to stay

    Sinks and window come on top of that share, and are not counted in it; nor is what `proposal` is certain of.
    Novelty (`by=keydiff`) guards what nobody has asked for yet, attention samples the rest: continuation and retrieval
    want different entries. Source: ours.
    """

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
    def attends(self) -> bool:  # type: ignore[override]  # either, as below
        return self.proposal.attends or self.by.attends

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]
        return self.proposal.needs_rotation or self.by.needs_rotation

    @property
    def needs_output(self) -> bool:  # type: ignore[override]
        return self.proposal.needs_output or self.by.needs_output

    @property
    def extra_passes(self) -> int:  # type: ignore[override]
        return max(self.proposal.extra_passes, self.by.extra_passes)

    def __call__(self, observation: Observation) -> Proposal:
        inner = self.proposal(observation)
        by = self.by(observation).score
        if not torch.isfinite(by).all():  # the policy reports it, as for the sampled proposal
            return replace(inner, score=by)
        return replace(inner, certain=inner.certain | ranked_first(observation, by, inner.certain, self.share))


def ranked_first(
    observation: Observation, by: Float[Tensor, "b h t"], certain: Bool[Tensor, "b h t"], share: float
) -> Bool[Tensor, "b h t"]:
    """The floor(share * budget) entries that `by` ranks first, of those that are neither protected nor certain

    Fewer where these leave less room in the budget.
    """
    taken = observation.protected | certain
    rank = by.masked_fill(taken | observation.made | ~observation.valid, -1.0)
    wanted = (share * observation.budget.double() + 1e-9).floor().long()
    room = observation.budget[:, None] - taken.sum(dim=-1)
    count = torch.minimum(wanted[:, None], room.clamp_min(0))
    order = rank.argsort(dim=-1, descending=True, stable=True)
    ahead = torch.arange(rank.shape[-1], device=rank.device) < count[..., None]
    return torch.zeros_like(certain).scatter_(-1, order, ahead) & (rank >= 0)
