"""Weights accumulate: over all outcomes of two rounds the estimates are those of the full cache."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from build import first_round
from kvest.correct import Counts, Inclusion
from kvest.propose import KeyNorm, Mixed
from kvest.retain import Store, retain
from kvest.types import Draw, Observation
from outcomes import poisson, systematic, with_replacement


def evictions(observation: Observation, outcomes, count: int, correct):
    """(probability, Retained) of every outcome of one eviction of one head: the last entry is certain to stay."""
    proposal = replace(Mixed(KeyNorm(), 0.6)(observation), certain=observation.protected)
    probabilities, draws = outcomes(proposal, observation.valid, count)
    for i, probability in enumerate(probabilities.tolist()):
        if probability > 0:
            draw = Draw(*(getattr(draws, f.name)[i : i + 1] for f in fields(Draw)))
            yield probability, retain(observation, draw, correct(draw, observation))


def held(store: Store, like: Observation) -> Observation:
    """What the store holds, to be evicted again."""
    slots, lengths = store.right_aligned()
    return replace(
        like,
        keys=store.keys[slots],
        values=store.values[slots],
        log_weights=store.log_weights[slots],
        positions=store.positions[slots].long(),
        lengths=lengths,
        seen=like.seen + 1,
    )


@pytest.mark.parametrize("correct", [Inclusion(), Counts()], ids=repr)
@pytest.mark.parametrize(("outcomes", "counts"), [(poisson, (4, 3)), (systematic, (4, 3)), (with_replacement, (3, 2))])
def test_weights_of_two_rounds_are_unbiased(outcomes, counts, correct, generator):
    """Each entry's mean weight is 1 (0 where it is gone): after a round, an appended token, and a second round.

    The second round's probabilities depend on what the first one kept. Log weights are stored in float32: 1e-6.
    """
    whole = replace(first_round(generator, lengths=(6,), sinks=0, window=1).head(0, 0), prepared=None)
    after_one, after_two = torch.zeros(2, 7, dtype=torch.float64)
    for p, first in evictions(whole, outcomes, counts[0], correct):
        after_one[first.positions.long()] += p * first.log_weights.double().exp()
        store = Store(first)
        store.append(torch.full((1, 1, 1, 14), 0.4), torch.ones(1, 1, 1, 7), torch.tensor([[6]]))
        for p_again, second in evictions(held(store, whole), outcomes, counts[1], correct):
            after_two[second.positions.long()] += p * p_again * second.log_weights.double().exp()
            assert (second.positions.diff() > 0).all()
    torch.testing.assert_close(after_one, torch.tensor([1.0] * 6 + [0.0], dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(after_two, torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-6)
