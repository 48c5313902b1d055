"""What every wrapper is: a proposal made of another one."""

from __future__ import annotations

from dataclasses import dataclass

from kvest.propose._base import Propose


@dataclass(frozen=True)
class Wrapper(Propose):
    """Looks at what the inner `proposal` looks at, and needs, carries and allows what it does."""

    proposal: Propose

    @property
    def queries(self) -> int | None:
        return self.proposal.queries

    @property
    def deterministic_only(self) -> bool:  # type: ignore[override]  # of a wrapper, as below: the inner proposal's
        return self.proposal.deterministic_only

    @property
    def carries(self) -> bool:  # type: ignore[override]
        return self.proposal.carries

    @property
    def attends(self) -> bool:  # type: ignore[override]
        return self.proposal.attends

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]
        return self.proposal.needs_rotation

    @property
    def needs_output(self) -> bool:  # type: ignore[override]
        return self.proposal.needs_output

    @property
    def extra_passes(self) -> int:  # type: ignore[override]
        return self.proposal.extra_passes
