"""Allocations: whole numbers that sum to the budget, and heads that compete by one threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference_sampling as reference
from build import default, first_round, second_round
from kvest.allocate import ALLOCATIONS, OneThreshold, UniformAllocation
from kvest.allocate._compete import largest_remainder
from kvest.propose import H2O, Uniform
from kvest.sample import DESIGNS, Poisson, Systematic, TopK, WithReplacement
from kvest.types import Observation, Proposal

every_round = pytest.mark.parametrize("make", [first_round, second_round])


def layers(make, generator: torch.Generator, **fields) -> tuple[list[Proposal], list[Observation]]:
    """Three layers, from flat scores to peaked ones."""
    observations = [make(generator, **fields) for _ in range(3)]
    proposals = []
    for o, power in zip(observations, (0.3, 1.0, 3.0), strict=True):
        made = H2O(values=True)(o)
        proposals.append(replace(made, score=made.score**power * o.valid, certain=o.protected))
    return proposals, observations


def free_scores(proposals, observations, row: int, normal: bool = True) -> list[list[float]]:
    """Scores of what may be drawn, head after head of all layers, each summing to 1 (`normal`) or as they are."""
    out = []
    for p, o in zip(proposals, observations, strict=True):
        for h in range(o.keys.shape[1]):
            x = p.score[row, h][o.valid[row, h] & ~p.certain[row, h]].double().tolist()
            out.append([a / (sum(x) if normal else 1) for a in x])
    return out


def row_of(counts, row: int) -> list[int]:
    return torch.cat([c[row] for c in counts]).tolist()


@every_round
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize("budget", [(5, 5), (9, 7), (12, 11), (23, 23)])
def test_counts_sum_to_the_budget_of_each_row(budget, allocate, design, make, generator):
    """At least what is certain, at most what is there, and the sum is the budget, or all that there is."""
    proposals, observations = layers(make, generator, budget=torch.tensor(budget))
    counts = ALLOCATIONS[allocate]()(proposals, observations, default(DESIGNS[design]))
    for row in range(2):
        lengths = [n for o in observations for n in o.lengths[row].tolist()]
        certain = [n for p in proposals for n in p.certain[row].sum(-1).tolist()]
        got = row_of(counts, row)
        assert all(low <= n <= high for low, n, high in zip(certain, got, lengths, strict=True))
        if allocate in ("uniform", "pyramid"):  # of one layer
            assert got == [min(n, budget[row]) for n in lengths]
        else:
            assert sum(got) == min(budget[row] * len(got), sum(lengths))


@every_round
@pytest.mark.parametrize("raw", [False, True])
def test_top_k_heads_are_ranked_together(raw, make, generator):
    """One threshold for top_k is the global ranking of all heads' normalised scores, or of the scores as they are."""
    proposals, observations = layers(make, generator)
    counts = OneThreshold(raw)(proposals, observations, TopK())
    for row in range(2):
        scores = free_scores(proposals, observations, row, normal=not raw)
        certain = [n for p in proposals for n in p.certain[row].sum(-1).tolist()]
        ranked = sorted(((x, head) for head, xs in enumerate(scores) for x in xs), reverse=True)
        total = int(observations[0].budget[row]) * len(scores) - sum(certain)
        winners = [head for _, head in ranked[:total]]
        assert row_of(counts, row) == [certain[head] + winners.count(head) for head in range(len(scores))]


def rounded(wanted: list[float], total: int) -> list[int]:
    """Largest remainder; of equal ones the first head."""
    counts = [int(w) for w in wanted]
    order = sorted(range(len(wanted)), key=lambda i: round(wanted[i] - counts[i], 6), reverse=True)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("design", [TopK(), Systematic(), WithReplacement()], ids=repr)
def test_raw_scores_count_by_their_size_relative_to_others(design, size, generator):
    """One layer's heads of ten times the score keep more than they would; what unit all are in does not matter."""
    proposals, observations = layers(first_round, generator)
    larger = [replace(p, score=p.score * size * (10 if i == 1 else 1)) for i, p in enumerate(proposals)]
    before, after = (OneThreshold(True)(x, observations, design) for x in (proposals, larger))
    assert (after[1] >= before[1]).all()
    assert after[1].sum() > before[1].sum()
    assert sum(c.sum() for c in after) == sum(c.sum() for c in before)
    if size == 1.0:
        normal = (row_of(OneThreshold()(x, observations, design), 0) for x in (proposals, larger))
        assert next(normal) == next(normal)


@every_round
@pytest.mark.parametrize("design", [Systematic(), Poisson(), WithReplacement()], ids=repr)
def test_one_rate_for_the_whole_model(design, make, generator):
    """pi = min(1, c x) with one c, or 1 - (1 - x)^m with one m, found by bisection over all heads of a row."""
    proposals, observations = layers(make, generator)
    counts = OneThreshold()(proposals, observations, design)
    for row in range(2):
        scores = free_scores(proposals, observations, row)
        certain = [n for p in proposals for n in p.certain[row].sum(-1).tolist()]
        total = int(observations[0].budget[row]) * len(scores) - sum(certain)
        flat = [x for xs in scores for x in xs]
        if isinstance(design, WithReplacement):
            low, high = 0.0, 1e9
            for _ in range(200):
                m = (low + high) / 2
                below = sum(sum(reference.distinct(xs, m)) for xs in scores) < total
                low, high = (m, high) if below else (low, m)
            pi = [p for xs in scores for p in reference.distinct(xs, low)]
        else:
            pi = reference.inclusion(flat, total)
        ends = [sum(len(xs) for xs in scores[: i + 1]) for i in range(len(scores))]
        wanted = [sum(pi[end - len(xs) : end]) for end, xs in zip(ends, scores, strict=True)]
        assert max(wanted) > 1.5 * min(wanted)  # heads do differ
        assert row_of(counts, row) == [c + n for c, n in zip(certain, rounded(wanted, total), strict=True)]


@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_that_is_not_due_keeps_everything(design, allocate, generator):
    """Its budget is what it holds, all of it protected; the other row keeps what it keeps without it."""
    fields = {"budget": torch.tensor([9, 23])}
    proposals, observations = layers(second_round, generator, **fields, due=torch.tensor([True, False]))
    counts = ALLOCATIONS[allocate]()(proposals, observations, default(DESIGNS[design]))
    assert row_of(counts, 1) == [n for o in observations for n in o.lengths[1].tolist()]
    assert sum(row_of(counts, 0)) == 9 * 9


def test_ties_are_shared_evenly(generator):
    """All scores equal, in heads of equal length: top_k by one threshold is top_k per head."""
    observations = [first_round(generator, lengths=(23,), budget=torch.tensor([11])) for _ in range(2)]
    proposals = [replace(Uniform()(o), certain=o.protected) for o in observations]
    for design in (TopK(), Systematic(), WithReplacement()):
        assert row_of(OneThreshold()(proposals, observations, design), 0) == [11] * 6


def test_which_allocations_need_all_layers_at_once():
    assert not UniformAllocation.whole_model
    assert OneThreshold.whole_model


@given(st.lists(st.floats(0, 50), min_size=1, max_size=11), st.data())
def test_largest_remainder_moves_no_head_by_more_than_1(wanted, data):
    """Whole numbers within 1 of what was wanted, at most `most`, that sum to the total of what was wanted."""
    total = round(sum(wanted))
    wanted = [w * total / sum(wanted) if sum(wanted) else 0.0 for w in wanted]
    most = [int(w) + 1 + data.draw(st.integers(0, 3)) for w in wanted]
    got = largest_remainder(torch.tensor([wanted], dtype=torch.float64), torch.tensor([total]), torch.tensor([most]))[
        0
    ].tolist()
    assert sum(got) == total
    assert all(abs(n - w) < 1 + 1e-6 and 0 <= n <= m for n, w, m in zip(got, wanted, most, strict=True))


def test_equal_remainders_go_by_head_order_and_not_by_rounding_noise():
    """Heads without a capped entry want exactly c each; the last bit may differ with the padding in front."""
    for noise in (1e-13, -1e-13):
        wanted = torch.tensor([[7.47 + noise, 7.47, 7.47 - noise, 3.59]], dtype=torch.float64)
        assert largest_remainder(wanted, torch.tensor([26]), torch.full((1, 4), 9)).tolist() == [[8, 7, 7, 4]]
