"""Observations to test with: distinct primes for axes, values that are not symmetric, garbage on missing slots."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kvest.propose import PROPOSALS, Propose
from kvest.rotary import Rotation
from kvest.sample import DESIGNS
from kvest.types import Observation

AXES = {"b": 2, "h": 3, "g": 5, "q": 11, "t": 23, "d": 14, "e": 7, "m": 29}  # d is even, for the rotary embedding


ROTATION = Rotation(lambda: (7.0 ** -(torch.arange(7) / 7), 1.0))


def first_round(generator: torch.Generator, lengths: tuple[int, ...] = (23, 17), **fields: Any) -> Observation:
    """After a prompt: every token is an entry and has its query; the shorter rows are padded in front."""
    b, t = len(lengths), max(lengths)
    seen = torch.tensor(lengths)
    positions = torch.arange(t) - (t - seen)[:, None, None]
    return _observation(
        generator,
        q=t,
        positions=positions.expand(b, AXES["h"], t),
        lengths=seen[:, None].expand(b, AXES["h"]),
        query_lengths=seen,
        seen=seen,
        **fields,
    )


def second_round(
    generator: torch.Generator,
    lengths: tuple[tuple[int, ...], ...] = ((23, 19, 13), (17, 23, 12)),
    query_lengths: tuple[int, ...] = (11, 7),
    seen: tuple[int, ...] = (53, 47),
    **fields: Any,
) -> Observation:
    """After an eviction and some more tokens: gaps in the positions, weights on the old entries, uneven heads."""
    b, h, t = len(lengths), len(lengths[0]), max(max(row) for row in lengths)
    positions = torch.zeros(b, h, t, dtype=torch.int64)
    log_weights = torch.zeros(b, h, t)
    for row in range(b):
        for head in range(h):
            held, asked = lengths[row][head], query_lengths[row]
            old = torch.randperm(seen[row] - asked, generator=generator)[: held - asked].sort().values
            new = torch.arange(seen[row] - asked, seen[row])
            positions[row, head, t - held :] = torch.cat([old, new])
            log_weights[row, head, t - held : t - asked] = 3 * torch.rand(held - asked, generator=generator)
    made = _observation(
        generator,
        q=max(query_lengths),
        positions=positions,
        lengths=torch.tensor(lengths),
        query_lengths=torch.tensor(query_lengths),
        seen=torch.tensor(seen),
        log_weights=log_weights,
        **fields,
    )
    history = 5 * torch.rand(b, h, t, generator=generator) * made.valid
    history[:, :, t - min(query_lengths) :] = 0
    return replace(made, history=history)


def made_round(generator: torch.Generator, **fields: Any) -> Observation:
    """As `second_round`, where the first entries of each head were made: position -1, three of them or fewer."""
    observation = second_round(generator, **fields)
    rank = torch.arange(observation.keys.shape[2]) - observation.keys.shape[2] + observation.lengths[..., None]
    made = (rank >= 0) & (rank < torch.tensor([[3, 2, 3], [1, 3, 0]])[..., None])
    return replace(observation, positions=observation.positions.masked_fill(made, -1))


def _observation(
    generator: torch.Generator, *, q: int, positions: Tensor, lengths: Tensor, query_lengths: Tensor, **fields: Any
) -> Observation:
    b, h, t = positions.shape

    def draw(*shape: int) -> Tensor:
        return 1 + torch.randn(shape, generator=generator)

    made = Observation(
        queries=draw(b, h, AXES["g"], q, AXES["d"]),
        keys=draw(b, h, t, AXES["d"]),
        values=draw(b, h, t, AXES["e"]),
        positions=positions,
        lengths=lengths,
        query_lengths=query_lengths,
        **{
            "log_weights": torch.zeros(b, h, t),
            "budget": torch.tensor([12, 9, 10][:b]),
            "due": torch.ones(b, dtype=torch.bool),
            "scale": 0.31,
            "sinks": 2,
            "window": 3,
            "rotation": ROTATION,
            "output": 1 + torch.randn(h, AXES["g"], AXES["m"], AXES["e"], generator=generator),
            **fields,
        },
    )
    made = replace(made, prepared=torch.rand(b, h, t, generator=generator))
    missing, silent = ~made.valid[..., None], ~made.query_valid[:, None, None, :, None]
    return replace(
        made,
        keys=made.keys.masked_fill(missing, 1e3),
        values=made.values.masked_fill(missing, -1e3),
        prepared=made.prepared.masked_fill(missing[..., 0], 1e3),
        queries=made.queries.masked_fill(silent, 1e3),
    )


def part(observation: Observation, row: int, **changes: Any) -> Observation:
    """One row as it stands when it is alone: no padding in front of its longest head or of its queries."""
    t, q = observation.keys.shape[2], observation.queries.shape[3]
    slots = slice(t - int(observation.lengths[row].max()), t)
    asked = slice(q - int(observation.query_lengths[row]), q)
    one = slice(row, row + 1)
    history = observation.history
    alone = replace(
        observation,
        queries=observation.queries[one, :, :, asked],
        keys=observation.keys[one, :, slots],
        values=observation.values[one, :, slots],
        log_weights=observation.log_weights[one, :, slots],
        positions=observation.positions[one, :, slots],
        lengths=observation.lengths[one],
        query_lengths=observation.query_lengths[one],
        seen=observation.seen[one],
        budget=observation.budget[one],
        due=observation.due[one],
        history=None if history is None else history[one, :, slots],
        prepared=observation.prepared[one, :, slots],
    )
    return replace(alone, **changes)


def default(kind: type, inner: str = "h2o") -> Any:
    """A part at its defaults; a proposal that it needs is `inner`, a design systematic."""
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return kind(**{n: default(PROPOSALS[inner]) if hints[n] is Propose else DESIGNS["systematic"]() for n in needed})
