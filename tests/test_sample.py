"""Designs, by enumeration: every outcome with its probability, no tolerance beyond 1e-12, no Monte Carlo."""

from __future__ import annotations

import pytest
import torch

import reference_sampling as reference
from build import default
from kvest.sample import DESIGNS, Poisson, Systematic, TopK, WithReplacement
from kvest.types import Proposal
from outcomes import chosen, drawn, expect, poisson, proposal, systematic, with_replacement

EXACT = {"rtol": 0, "atol": 1e-12}


TAILED = [0.9, 0.05, 3.0, 1.7, 0.31, 40.0, 0.6, 1.1]  # one entry reaches probability 1 by itself
CASES = {
    "poisson": (poisson, TAILED, (), 0, 4),
    "poisson, certain and missing": (poisson, TAILED[:6], (1,), 2, 3),
    "systematic": (systematic, TAILED, (), 0, 4),
    "systematic, certain and missing": (systematic, TAILED, (1, 7), 3, 6),
    "systematic, one": (systematic, TAILED, (), 0, 1),
    "with_replacement": (with_replacement, [0.9, 0.3, 1.7, 1.1, 0.6], (), 0, 3),
    "with_replacement, certain and missing": (with_replacement, [0.9, 0.3, 5.0, 1.1, 0.6], (2,), 2, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_design_states_is_what_happens(case):
    """Over all outcomes: P(kept) is `inclusion`, the mean multiplicity is `expected`, probabilities sum to 1."""
    enumerate_, scores, certain, missing, count = CASES[case]
    made, valid = proposal(scores, certain, missing)
    probability, draw = enumerate_(made, valid, count)
    torch.testing.assert_close(probability.sum(), torch.tensor(1.0, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(expect(probability, draw.keep), draw.inclusion[0, 0], **EXACT)
    torch.testing.assert_close(expect(probability, draw.multiplicity), draw.expected[0, 0], **EXACT)
    possible = draw.keep[probability > 0]
    assert possible[:, made.certain[0]].all()
    assert not possible[:, ~valid[0]].any()


@pytest.mark.parametrize("case", CASES)
def test_weighted_sums_are_unbiased(case):
    """Numerator and denominator of attention, over all outcomes: by 1 / pi, and by counts over their mean."""
    enumerate_, scores, certain, missing, count = CASES[case]
    made, valid = proposal(scores, certain, missing)
    probability, draw = enumerate_(made, valid, count)
    a = valid[0, 0] * torch.linspace(0.3, 2.9, valid.shape[-1], dtype=torch.float64).exp()
    v = 1 + torch.linspace(-0.7, 5.3, valid.shape[-1], dtype=torch.float64).cos()
    for weight in (draw.keep / draw.inclusion, draw.multiplicity / draw.expected):
        weight = weight[:, 0].nan_to_num()
        for amount in (a, a * v):
            mean = (probability * (weight * amount).sum(-1)).sum()
            torch.testing.assert_close(mean, amount.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("design", [Poisson(), Systematic()], ids=repr)
@pytest.mark.parametrize("count", [1, 3, 4, 6, 8])
def test_inclusion_is_proportional_up_to_1(design, count):
    """pi_i = min(1, c x_i), sum pi = m: equal to the twin's bisection."""
    made, valid = proposal(TAILED, (), 2)
    draw = drawn(design, made, valid, count, torch.zeros(1, 1, 1))
    want = torch.tensor([0.0, 0.0, *reference.inclusion(TAILED, count)], dtype=torch.float64)
    torch.testing.assert_close(draw.inclusion[0, 0], want, rtol=1e-6, atol=1e-12)  # scores are float32
    torch.testing.assert_close(draw.inclusion.sum(), torch.tensor(float(count), dtype=torch.float64), **EXACT)
    assert (draw.inclusion <= 1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8])
def test_with_replacement_draws_as_often_as_the_count_allows(count):
    """The number of draws is the largest whose expected number of distinct entries stays within the count."""
    x = [a for a in TAILED if a < 40]
    made, valid = proposal(x, (), 1)
    draw = drawn(WithReplacement(), made, valid, min(count, 7), torch.zeros(1, 1, 1))
    n = reference.draws_for(x, min(count, 7))
    want = torch.tensor([0.0, *reference.distinct(x, n)], dtype=torch.float64)
    torch.testing.assert_close(draw.inclusion[0, 0], want, rtol=1e-6, atol=1e-12)
    assert int(draw.multiplicity.sum()) == n


def test_heads_that_draw_more_do_not_add_draws_to_others():
    """In one call each head is drawn as often as its own count says: the counts sum to what is expected."""
    made, valid = proposal([0.9, 0.3, 1.7, 1.1, 0.6])
    wide = Proposal(made.score.expand(1, 3, 5), made.certain.expand(1, 3, 5))
    counts, positions = torch.tensor([[1, 4, 2]]), torch.arange(5).expand(1, 3, 5)
    draw = WithReplacement()(wide, valid.expand(1, 3, 5), counts, positions, chosen(torch.full((1, 1, 1), 0.37)))
    torch.testing.assert_close(draw.multiplicity.sum(-1).double(), draw.expected.sum(-1))
    assert len(draw.expected.sum(-1).unique()) == 3


def test_entries_of_score_0_stay_only_when_all_others_do():
    """And then equally: with 3 positive scores and a count of 4, one of the two others is drawn."""
    made, valid = proposal([0.0, 2.0, 0.3, 0.0, 1.0], (), 0)
    draw = drawn(Systematic(), made, valid, 3, torch.zeros(1, 1, 1))
    torch.testing.assert_close(draw.inclusion[0, 0], torch.tensor([0.0, 1, 1, 0, 1], dtype=torch.float64), **EXACT)
    draw = drawn(Systematic(), made, valid, 4, torch.zeros(1, 1, 1))
    torch.testing.assert_close(draw.inclusion[0, 0], torch.tensor([0.5, 1, 1, 0.5, 1], dtype=torch.float64), **EXACT)


def test_top_k_takes_the_largest_and_of_equal_ones_the_most_recent():
    made, valid = proposal([3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 0.5], (6,), 2)
    draws = [drawn(TopK(), made, valid, count, torch.zeros(1, 1, 1)) for count in range(1, 8)]
    kept = [draw.keep[0, 0, 2:].nonzero()[:, 0].tolist() for draw in draws]
    assert kept == [[6], [0, 6], [0, 4, 6], [0, 2, 4, 6], [0, 2, 4, 5, 6], [0, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("name", [n for n, d in DESIGNS.items() if default(d).fixed_size])
def test_a_fixed_size_design_keeps_exactly_its_count(name, generator):
    """For peaked, flat and zero scores, any start, and every count that is possible."""
    scores = torch.rand(300, 1, 13, generator=generator) ** torch.tensor([1.0, 8.0, 60.0]).repeat(100)[:, None, None]
    scores[::7, :, 4:9] = 0
    certain = torch.rand(300, 1, 13, generator=generator) < 0.2
    valid = torch.arange(13) >= torch.randint(0, 6, (300, 1, 1), generator=generator)
    certain &= valid
    low, high = certain.sum(-1), valid.sum(-1)
    counts = low + (torch.rand(300, 1, generator=generator) * (high - low + 1)).long()
    starts = chosen(torch.rand(300, 1, 1, generator=generator, dtype=torch.float64))
    made, positions = Proposal(scores * valid, certain), torch.arange(13).expand(300, 1, 13)
    draw = default(DESIGNS[name])(made, valid, counts, positions, starts)
    assert torch.equal(draw.keep.sum(-1), counts)
    torch.testing.assert_close(draw.inclusion.sum(-1), counts.double(), rtol=0, atol=1e-9)
    assert (draw.keep | ~certain).all()


@pytest.mark.parametrize("start", [0.0, 1 - 2**-53])
def test_systematic_keeps_its_count_at_the_ends_of_the_unit_interval(start):
    """No point is lost to rounding: 977 equal probabilities that sum to 331."""
    made, valid = proposal([0.1] * 977)
    draw = drawn(Systematic(), made, valid, 331, torch.full((1, 1, 1), start, dtype=torch.float64))
    assert int(draw.keep.sum()) == 331
