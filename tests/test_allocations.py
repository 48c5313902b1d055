"""Allocations of the papers against their twins (`reference_designs.py`): pyramid, adaptive, lava."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference_designs as twins
import reference_sampling
from build import first_round, second_round
from kvest.allocate import Adaptive, LavaAllocation, Pyramid
from kvest.allocate._compete import largest_remainder
from kvest.allocate.lava import shares
from kvest.propose import H2O, Uniform
from kvest.sample import Poisson, Systematic, TopK, WithReplacement
from kvest.types import Observation, Proposal, Split

every_round = pytest.mark.parametrize("make", [first_round, second_round])


def layers(make, generator: torch.Generator, **fields) -> tuple[list[Proposal], list[Observation]]:
    """Five layers, from flat scores to peaked ones; the heads of each from small scores to large ones."""
    observations = [make(generator, layer=n, layers=5, **fields) for n in range(5)]
    proposals = []
    for o, power in zip(observations, (0.2, 0.5, 1.0, 2.0, 3.0), strict=True):
        made = H2O(values=True)(o)
        score = made.score**power * o.valid * torch.tensor([0.2, 1.0, 3.0])[:, None]
        proposals.append(replace(made, score=score, certain=o.protected))
    return proposals, observations


def free(proposal: Proposal, observation: Observation, row: int) -> list[list[float]]:
    """Scores of what may be drawn, head after head."""
    open_ = observation.valid[row] & ~proposal.certain[row]
    return [x[mine].double().tolist() for x, mine in zip(proposal.score[row], open_, strict=True)]


def numbers(x: torch.Tensor, row: int) -> list[int]:
    return x[row].sum(-1).tolist()


@pytest.mark.parametrize("beta", [1.0, 2.0, 20.0])
@pytest.mark.parametrize("budget", [(6, 6), (12, 9), (17, 16), (23, 17)])
def test_pyramid_is_a_line_whose_mean_is_the_budget(budget, beta, generator):
    """Each layer by itself, as a policy of layers that do not compete calls it."""
    proposals, observations = layers(first_round, generator, budget=torch.tensor(budget))
    counts = [Pyramid(beta)([p], [o], TopK())[0] for p, o in zip(proposals, observations, strict=True)]
    for row, seen in enumerate((23, 17)):
        want = twins.pyramid(budget[row], 5, seen, 5, beta)
        got = [c[row].tolist() for c in counts]
        assert got == [[n] * 3 for n in want]
        assert sum(want) == 5 * budget[row]
        assert all(late <= early <= seen for early, late in itertools.pairwise(want))
        assert len(set(want)) > 1 or beta == 1 or budget[row] in (6, seen)


def test_pyramid_takes_no_less_than_what_is_certain_and_no_more_than_there_is(generator):
    proposals, observations = layers(second_round, generator, budget=torch.tensor([14, 13]))
    certain = proposals[4].certain | (observations[4].valid & (observations[4].positions % 2 == 0))
    proposals[4] = replace(proposals[4], certain=certain)
    counts = Pyramid()(proposals, observations, TopK())
    for row, seen in enumerate((53, 47)):
        line = twins.pyramid((14, 13)[row], 5, seen, 5, 20.0)
        for n, (p, o, c) in enumerate(zip(proposals, observations, counts, strict=True)):
            sure, there = numbers(p.certain, row), o.lengths[row].tolist()
            assert c[row].tolist() == [min(max(line[n], low), high) for low, high in zip(sure, there, strict=True)]
    assert (counts[0] == observations[0].lengths).any()
    assert (counts[4] > 6).any()


def test_a_pyramid_of_one_layer_is_uniform(generator):
    o = first_round(generator)
    assert Pyramid()([Uniform()(o)], [o], TopK())[0].tolist() == [[12] * 3, [9] * 3]


@every_round
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.75, 1.0])
def test_adaptive_top_k_ranks_the_heads_of_a_layer_together(floor, make, generator):
    """By the scores as they are; each head keeps floor of its share, what is certain counts towards it."""
    proposals, observations = layers(make, generator)
    counts = Adaptive(floor)(proposals, observations, TopK())
    spread = 0
    for p, o, c in zip(proposals, observations, counts, strict=True):
        for row in range(2):
            sure, budget = numbers(p.certain, row), int(o.budget[row])
            total = min(3 * budget, int(o.lengths[row].sum()))
            least = [max(0, int(floor * budget + 1e-9) - n) for n in sure]
            want = twins.ranked_together(free(p, o, row), total - sum(sure), least)
            got = c[row].tolist()
            assert got == [n + m for n, m in zip(sure, want, strict=True)]
            assert sum(got) == total
            assert all(n >= min(int(floor * budget + 1e-9), m) for n, m in zip(got, o.lengths[row], strict=True))
            spread = max(spread, max(got) - min(got))
    assert (spread > 2) == (floor < 1) or make is second_round


@every_round
@pytest.mark.parametrize("design", [Systematic(), Poisson(), WithReplacement()], ids=repr)
def test_adaptive_samples_the_heads_of_a_layer_at_one_rate(design, make, generator):
    """Probabilities of all heads of a layer, drawn as one."""
    proposals, observations = layers(make, generator)
    counts = Adaptive(0.0)(proposals, observations, design)
    for p, o, c in zip(proposals, observations, counts, strict=True):
        for row in range(2):
            sure, heads = numbers(p.certain, row), free(p, o, row)
            total = min(3 * int(o.budget[row]), int(o.lengths[row].sum())) - sum(sure)
            flat = [x for xs in heads for x in xs]
            if isinstance(design, WithReplacement):
                low, high = 0.0, 1e9
                for _ in range(200):
                    n = (low + high) / 2
                    below = sum(reference_sampling.distinct(flat, n)) < total
                    low, high = (n, high) if below else (low, n)
                pi = reference_sampling.distinct(flat, low)
            else:
                pi = reference_sampling.inclusion(flat, total)
            for head, got in enumerate(c[row].tolist()):
                start = sum(len(xs) for xs in heads[:head])
                assert abs(got - sure[head] - sum(pi[start : start + len(heads[head])])) < 1 + 1e-6


@every_round
@pytest.mark.parametrize("budget", [(12, 9), (17, 15)])
def test_lava_gives_layers_what_their_entropy_says(budget, make, generator):
    """Scattered layers more, none more than it holds; then heads by their scores as they are."""
    proposals, observations = layers(make, generator, budget=torch.tensor(budget))
    certain = proposals[1].certain | (observations[1].valid & (observations[1].positions % 3 > 0))
    proposals[1] = replace(proposals[1], certain=certain)  # less of it is drawn than of the others
    counts = LavaAllocation()(proposals, observations, TopK())
    for row in range(2):
        flat = [[x for xs in free(p, o, row) for x in xs] for p, o in zip(proposals, observations, strict=True)]
        sure = [sum(numbers(p.certain, row)) for p in proposals]
        there = [int(o.lengths[row].sum()) for o in observations]
        most = [n - m for n, m in zip(there, sure, strict=True)]
        total = min(15 * int(observations[0].budget[row]), sum(there)) - sum(sure)
        wanted = twins.filled([twins.entropy(x) for x in flat], total, most)
        rounded = largest_remainder(
            torch.tensor([wanted], dtype=torch.float64), torch.tensor([total]), torch.tensor([most])
        )[0].tolist()
        assert len(set(rounded)) > 2
        for p, o, c, n in zip(proposals, observations, counts, rounded, strict=True):
            want = twins.ranked_together(free(p, o, row), n, [0, 0, 0])
            assert c[row].tolist() == [n + m for n, m in zip(numbers(p.certain, row), want, strict=True)]
        assert sum(int(c[row].sum()) for c in counts) == total + sum(sure)


@given(st.lists(st.tuples(st.floats(1e-3, 50), st.integers(0, 40)), min_size=1, max_size=9), st.data())
def test_shares_are_proportional_up_to_what_there_is(parts, data):
    weights, most = [w for w, _ in parts], [n for _, n in parts]
    total = data.draw(st.integers(0, sum(most)))
    got = shares(torch.tensor([weights], dtype=torch.float64), torch.tensor([total]), torch.tensor([most]))[0]
    want = torch.tensor(twins.filled(weights, total, most), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@every_round
@pytest.mark.parametrize("allocate", [Adaptive(), LavaAllocation()], ids=repr)
def test_heads_in_other_processes_compete_too(allocate, make, generator):
    """Three processes with a head of each layer get what one process with all heads gives those heads."""
    proposals, observations = layers(make, generator)
    want = allocate(proposals, observations, Systematic())
    wide = {"queries", "keys", "values", "log_weights", "positions", "lengths", "history", "prepared"}
    barrier, said = threading.Barrier(3), [torch.empty(0)] * 3

    def process(rank: int) -> list[torch.Tensor]:
        def gather(x: torch.Tensor) -> list[torch.Tensor]:
            said[rank] = x
            barrier.wait(60)
            every = list(said)
            barrier.wait(60)
            return every

        def mine(x):
            return None if x is None else x[:, rank : rank + 1]

        parts = []
        for o in observations:
            part = replace(o, **{n: mine(getattr(o, n)) for n in wide}, output=None, split=Split(rank, gather))
            parts.append(part)
        return allocate([Proposal(mine(p.score), mine(p.certain)) for p in proposals], parts, Systematic())

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(process, range(3)))
    for n, counts in enumerate(want):
        assert torch.equal(torch.cat([layer[n] for layer in found], dim=1), counts)


def test_heads_without_any_score_are_filled_last(generator):
    """And evenly; a layer of zeros is a layer of equal scores."""
    o = first_round(generator, lengths=(23,), budget=torch.tensor([12]))
    made = H2O()(o)
    proposal = replace(made, score=made.score * torch.tensor([0.0, 1.0, 0.0])[:, None], certain=o.protected)
    assert Adaptive(0.0)([proposal], [o], TopK())[0].tolist() == [[7, 23, 6]]
    assert Adaptive(0.5)([proposal], [o], TopK())[0].tolist() == [[7, 23, 6]]
    nothing = replace(proposal, score=proposal.score * 0)
    for allocate in (Adaptive(0.0), LavaAllocation()):
        assert allocate([nothing], [o], Systematic())[0].tolist() == [[12, 12, 12]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pyramid(0.5), "pyramid needs beta >= 1, not 0.5"),
        (lambda: Adaptive(1.5), "adaptive needs 0 <= floor <= 1, not 1.5"),
        (lambda: Adaptive(-0.1), "adaptive needs 0 <= floor <= 1, not -0.1"),
    ],
)
def test_knobs_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_which_allocations_need_all_layers_at_once():
    assert not Pyramid.whole_model
    assert not Adaptive.whole_model
    assert LavaAllocation.whole_model
