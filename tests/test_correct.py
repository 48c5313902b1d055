"""Corrections against their twins: what a kept entry stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference_sampling as reference
from build import first_round, second_round
from kvest.correct import Counts, Inclusion, NoCorrection, Tempered
from kvest.propose import H2O, KeyNorm, Mixed, Propose
from kvest.random import Stream
from kvest.sample import Design, Poisson, Systematic, TopK, WithReplacement
from kvest.types import Draw, Observation

every_round = pytest.mark.parametrize("make", [first_round, second_round])
every_design = pytest.mark.parametrize("design", [Poisson(), Systematic(), WithReplacement()], ids=repr)


KEY_NORM = KeyNorm()


def sampled(observation: Observation, design: Design, propose: Propose = KEY_NORM) -> Draw:
    proposal = replace(Mixed(propose, 0.3)(observation), certain=observation.protected)
    counts = observation.budget[:, None].expand(2, 3)
    return design(proposal, observation.valid, counts, observation.positions, Stream(5, 1, [0, 2]))


@every_round
@every_design
def test_log_weights_equal_their_twins(design, make, generator):
    observation = make(generator)
    draw = sampled(observation, design)
    for correct, of, tau in [
        (NoCorrection(), "inclusion", 0.0),
        (Inclusion(), "inclusion", 1.0),
        (Counts(), "counts", 1.0),
        (Tempered(), "inclusion", 0.85),
        (Tempered(0.3), "inclusion", 0.3),
        (Tempered(0.6, "counts"), "counts", 0.6),
    ]:
        want = reference.log_weights(draw, of, tau)
        assert want.any() == (tau > 0)
        torch.testing.assert_close(correct(draw, observation).double(), want, rtol=1e-6, atol=1e-6)


@every_round
@every_design
@pytest.mark.parametrize("rows", [64, 5])
def test_automatic_tau_has_the_least_error_for_each_head(rows, design, make, generator):
    """On the last `rows` queries, while the full cache is there."""
    observation = make(generator)
    draw = sampled(observation, design)
    plain, grid = reference.log_weights(draw, "inclusion"), Tempered.grid
    want = reference.best_tau(observation, draw, plain, grid, rows)
    got = Tempered("auto", rows=rows)(draw, observation)
    torch.testing.assert_close(got.double(), plain * want[..., None], rtol=1e-5, atol=1e-6)


def test_automatic_tau_differs_between_heads(generator):
    observation = second_round(generator)
    draw = sampled(observation, Poisson(), H2O())
    found = reference.best_tau(observation, draw, reference.log_weights(draw, "inclusion"), Tempered.grid, 64)
    assert len(found.unique()) > 1  # or the test above would not see a tau that is shared


def test_queries_that_do_not_exist_have_no_say_in_tau(generator):
    """Whatever stands in their slots: queries that see all alike, and queries that look for what was evicted."""
    observation = second_round(generator)
    draw = sampled(observation, Poisson(), H2O())
    silent = ~observation.query_valid[:, None, None, :, None]
    found = []
    for garbage in (torch.zeros(14), torch.ones(14), *(9 * torch.randn(17, 14, generator=generator))):
        queries = torch.where(silent, garbage, observation.queries)
        found.append(Tempered("auto")(draw, replace(observation, queries=queries)))
    assert all(torch.equal(x, found[0]) for x in found)


@every_round
def test_without_replacement_counts_are_inclusion_weights(make, generator):
    observation = make(generator)
    for design in (Poisson(), Systematic(), TopK()):
        draw = sampled(observation, design)
        assert torch.equal(Counts()(draw, observation), Inclusion()(draw, observation))


@pytest.mark.parametrize("tau", [-0.01, 1.01])
def test_tempered_wants_a_tau_between_0_and_1(tau):
    with pytest.raises(ValueError, match="0 <= tau <= 1 or auto"):
        Tempered(tau)
