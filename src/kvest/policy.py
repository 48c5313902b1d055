"""The sentence that joins the stages, and the map of the library: read `Policy.evict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvest import grammar
from kvest.allocate import Allocate, UniformAllocation
from kvest.budget import Budget, Bytes, Entries, Fraction
from kvest.correct import Correct
from kvest.propose import Propose
from kvest.random import Stream
from kvest.retain import retain
from kvest.sample import Design
from kvest.stand_in import NoStandIn, StandIn
from kvest.stand_in._base import may_stay
from kvest.types import Observation, Proposal, Retained


@dataclass(frozen=True)
class Policy:
    """What to keep of a KV cache, and when: `PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]@BUDGET[, every=N]`

    One-shot by default: the cache is evicted once, after the prompt (the first forward pass). With `every=N` the
    budget stands: whenever a head holds N entries more than the budget, and after every pass of several tokens (a
    later turn, a chunk of a chunked prefill), it is evicted again. The first `sinks` positions and the `window` most
    recent entries always stay, and count towards the budget.

    Raises ValueError when parts do not go together.
    """

    propose: Propose
    design: Design
    correct: Correct
    budget: Budget
    allocate: Allocate = field(default_factory=UniformAllocation)
    stand_in: StandIn = field(default_factory=NoStandIn)
    every: int | None = None
    sinks: int = 4
    window: int = 16

    def __post_init__(self) -> None:
        if not self.design.random and self.correct.corrects:
            raise ValueError(
                f"{grammar.say(self.design)} keeps an entry with probability 0 or 1, so the log weight of "
                f"{grammar.say(self.correct)} would be 0 everywhere: write /none, or take a random design (systematic)"
            )
        if self.propose.deterministic_only and self.design.random:
            raise ValueError(
                f"{grammar.say(self.propose)} gives most entries probability 0, so {grammar.say(self.design)} has "
                "nothing to draw from: write /top_k/none, or mix it: mixed(streaming, 0.2)"
            )
        if self.stand_in.shares and not (self.design.random and self.correct.corrects):
            raise ValueError(
                f"{grammar.say(self.stand_in)} leaves a part of what is gone to the weights of the sample, and "
                f"{grammar.say(self.design)}/{grammar.say(self.correct)} gives none: leave share out, or write "
                "/systematic/inclusion"
            )
        if self.stand_in.brings_back and self.correct.corrects:
            raise ValueError(
                f"{grammar.say(self.stand_in)} brings back what is gone itself, and the weights of "
                f"{grammar.say(self.correct)} would stand for it a second time: write /none"
            )
        if self.propose.extra_passes and self.every is not None:
            raise ValueError(
                f"{grammar.say(self.propose)} scores what the document holds, once, in passes of its own, and "
                f"every={self.every} would evict what comes later as well: leave every= out"
            )
        if not isinstance(self.budget, Fraction | Entries | Bytes):
            raise ValueError(f"budget must be Fraction(0.25), Entries(2048) or Bytes('512MiB'), not {self.budget!r}")
        for name, least in (("sinks", 0), ("window", 0), ("every", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.window < 1:
            raise ValueError("window must be at least 1: the latest token's own entry always stays")
        if isinstance(self.budget, Entries) and self.budget.count < self.sinks + self.window:
            raise ValueError(
                f"a budget of {self.budget.count} entries per head cannot hold {self.sinks} sinks and a window of "
                f"{self.window}: raise it to at least {self.sinks + self.window}, or lower sinks= and window="
            )

    @classmethod
    def parse(cls, text: str, **fields: Any) -> Policy:
        """Read a policy as people write it; `fields` (`every=64`, `sinks=8`) override what the text says.

        >>> Policy.parse("snapkv/top_k/none@0.25").window
        16

        Raises PolicyError (a ValueError) with a caret under the place that cannot be read.
        """
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"a policy has no field {unknown[0]!r}. Known: {', '.join(cls.__dataclass_fields__)}")
        return cls(**{**grammar.parse(text), **fields})

    def __str__(self) -> str:
        return grammar.write(self)

    @property
    def queries(self) -> int | None:
        """The latest queries that any of its parts looks at; None: all."""
        return None if self.propose.queries is None else max(self.propose.queries, self.looks_back)

    @property
    def looks_back(self) -> int:
        """The latest queries that are looked at once the proposals are there."""
        return max(self.design.queries, self.correct.queries, self.stand_in.queries)

    def evict(self, observations: Sequence[Observation], streams: Sequence[Stream]) -> list[Retained]:
        """Evict some layers together: propose, allocate, sample, correct, stand in, retain."""
        proposals = [self.proposal(observation) for observation in observations]
        counts = self.allocate(proposals, observations, self.design)
        return [self.keep(*layer) for layer in zip(observations, proposals, counts, streams, strict=True)]

    def proposal(self, observation: Observation) -> Proposal:
        """Score one layer; sinks and window are certain to stay, and what was made is worth nothing."""
        proposal = self.propose(observation)
        finite = torch.isfinite(proposal.score).all()[None]
        if not torch.cat(observation.split.gather(finite)).all():  # in every process, so that none waits for another
            raise ValueError(
                f"{grammar.say(self.propose)} gave NaN or infinite scores: the layer's queries, keys or values are not "
                "finite (an overflow in float16? try bfloat16 or float32)"
            )
        history = proposal.history
        if history is not None:  # a row that is not due counts its queries when it is
            before = torch.zeros_like(history) if observation.history is None else observation.history
            history = torch.where(observation.due[:, None, None], history, before)
        made = observation.made
        certain = proposal.certain & ~made | observation.protected
        return Proposal(proposal.score.masked_fill(made, 0.0), certain, history)

    def keep(
        self, observation: Observation, proposal: Proposal, counts: Int[Tensor, "b h"], stream: Stream
    ) -> Retained:
        """The rest of `evict`, for one layer whose heads may hold so many: sample, correct, stand in, retain."""
        room = self.stand_in.room(proposal, observation, counts)
        proposal, open_ = may_stay(proposal, observation, counts)
        draw, log_weights = self.design.corrected(proposal, observation, open_, counts - room, stream, self.correct)
        stays = self.stand_in(draw, log_weights, observation, room)
        history = proposal if self.every else None
        return retain(stays.observation, draw, stays.log_weights, history, stays.made, stays.elsewhere)
