"""Importance in an allocation: each head at its own multiple of the one rate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from build import AXES, first_round, second_round
from kvest.allocate import OneThreshold
from kvest.grammar import PolicyError
from kvest.policy import Policy
from kvest.sample import Poisson, Systematic, TopK, WithReplacement
from kvest.types import Observation, Proposal, Split
from test_allocate import free_scores, layers, rounded, row_of

every_round = pytest.mark.parametrize("make", [first_round, second_round])
DESIGNS = [Systematic(), Poisson(), WithReplacement(), TopK()]


def weighed(make, generator: torch.Generator, **fields) -> tuple[list[Proposal], list[Observation]]:
    """Three layers whose heads differ in importance up to a factor of about twenty."""
    proposals, observations = layers(make, generator, **fields)
    drawn = [(1.5 * torch.randn(AXES["h"], generator=generator)).exp() for _ in observations]
    return proposals, [replace(o, importance=a) for o, a in zip(observations, drawn, strict=True)]


def inclusion(design, x: float, rate: float) -> float:
    if isinstance(design, WithReplacement):
        return 1.0 - (1.0 - x) ** rate
    if isinstance(design, TopK):
        return float(x * rate >= 1.0)
    return min(1.0, x * rate)


def expected(design, scores: list[list[float]], multiples: list[float], total: int) -> list[float]:
    """Sums of pi per head at the one rate where they sum to `total`, by bisection on its logarithm."""

    def at(log_rate: float) -> list[float]:
        return [
            math.fsum(inclusion(design, x, math.exp(log_rate) * m) for x in xs)
            for xs, m in zip(scores, multiples, strict=True)
        ]

    low, high = -60.0, 60.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(at(middle)) < total else (low, middle)
    return at(high)


@every_round
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
@pytest.mark.parametrize("power", [-1.0, 0.5, -2.0])
def test_each_head_is_sampled_at_its_own_multiple_of_one_rate(power, design, make, generator):
    """pi = inclusion(x, c a^power), one c for the model, found by loops in float64."""
    proposals, observations = weighed(make, generator)
    counts = OneThreshold(importance="calibrated", power=power)(proposals, observations, design)
    plain = OneThreshold()(proposals, observations, design)
    for row in range(2):
        scores = free_scores(proposals, observations, row)
        certain = [n for p in proposals for n in p.certain[row].sum(-1).tolist()]
        total = int(observations[0].budget[row]) * len(scores) - sum(certain)
        multiples = [a**power for o in observations for a in o.importance.double().tolist()]
        wanted = expected(design, scores, multiples, total)
        assert row_of(counts, row) == [c + n for c, n in zip(certain, rounded(wanted, total), strict=True)]
        assert row_of(counts, row) != row_of(plain, row)


@every_round
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
def test_power_0_is_no_importance(design, make, generator):
    proposals, observations = weighed(make, generator)
    counts = OneThreshold(importance="calibrated", power=0.0)(proposals, observations, design)
    plain = OneThreshold()(proposals, observations, design)
    for row in range(2):
        assert row_of(counts, row) == row_of(plain, row)


def test_only_ratios_of_importance_count(generator):
    """Its unit is the measurement's: nats, or anything else."""
    proposals, observations = weighed(second_round, generator)
    other = [replace(o, importance=o.importance * 1e-7) for o in observations]
    first, second = (OneThreshold(importance="damage")(proposals, each, Systematic()) for each in (observations, other))
    for row in range(2):
        assert row_of(first, row) == row_of(second, row)


@pytest.mark.parametrize("power", [-2.0, 2.0])
@pytest.mark.parametrize("dead", [0.0, 1e-30])
def test_a_head_that_was_never_felt_is_the_extreme_of_both_signs(dead, power, generator):
    """It gets all that it holds or what is certain, the row keeps its budget, and nothing is infinite."""
    proposals, observations = weighed(first_round, generator)
    heads = observations[1].importance.clone()
    heads[2] = dead
    observations[1] = replace(observations[1], importance=heads)
    counts = OneThreshold(importance="calibrated", power=power)(proposals, observations, Systematic())
    for row in range(2):
        certain, length = int(proposals[1].certain[row, 2].sum()), int(observations[1].lengths[row, 2])
        assert counts[1][row, 2] == (length if power < 0 else certain)
        assert sum(row_of(counts, row)) == 9 * int(observations[0].budget[row])


def test_an_observation_without_importance_is_refused_with_the_way_out(generator):
    proposals, observations = layers(first_round, generator)
    with pytest.raises(ValueError, match=r"was given none.*kvest calibrate MODEL"):
        OneThreshold(importance="calibrated")(proposals, observations, Systematic())


def test_two_processes_allocate_as_one_does(generator):
    """Each holds a slice of the heads, and the largest importance may be the other's."""
    proposals, observations = weighed(second_round, generator)
    proposals = [Proposal(p.score[:, :2], p.certain[:, :2]) for p in proposals]
    observations = [sliced(o, slice(0, 2)) for o in observations]
    whole = OneThreshold(importance="calibrated")(proposals, observations, Systematic())
    got = in_two_processes(proposals, observations)
    for rank in range(2):
        for layer in range(3):
            assert torch.equal(got[rank][layer], whole[layer][:, rank : rank + 1])


def sliced(o: Observation, heads: slice, split: Split | None = None) -> Observation:
    wide = ("queries", "keys", "values", "log_weights", "positions", "lengths", "history", "prepared")
    parts = {name: x[:, heads] for name in wide if (x := getattr(o, name)) is not None}
    return replace(o, **parts, output=o.output[heads], importance=o.importance[heads], split=split or o.split)


def in_two_processes(proposals: list[Proposal], observations: list[Observation]) -> list[list[torch.Tensor]]:
    """Two threads that meet whenever one gathers."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    barrier, wire = Barrier(2, timeout=60), [None, None]

    def gather(rank: int):
        def ask(x):
            wire[rank] = x
            barrier.wait()
            got = list(wire)
            barrier.wait()
            return got

        return ask

    def run(rank: int):
        mine = slice(rank, rank + 1)
        own = [Proposal(p.score[:, mine], p.certain[:, mine]) for p in proposals]
        seen = [sliced(o, mine, Split(rank, gather(rank))) for o in observations]
        return OneThreshold(importance="calibrated")(own, seen, Systematic())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_a_head_of_an_observation_has_its_own_importance(generator):
    _, observations = weighed(first_round, generator)
    assert observations[0].head(1, 2).importance.tolist() == [float(observations[0].importance[2])]


@pytest.mark.parametrize(
    "said",
    [
        "one_threshold(importance=calibrated)",
        "one_threshold(importance=calibrated, power=-0.5)",
        "one_threshold(importance=damage)",
        "one_threshold(importance=damage, power=0.25)",
    ],
)
def test_importance_reads_back_from_its_text(said):
    text = f"h2o(values=True)+{said}/systematic/tempered(0.85)@0.25"
    policy = Policy.parse(text)
    assert str(policy) == text
    assert Policy.parse(str(policy)) == policy


def test_each_word_has_a_power_of_its_own(generator):
    """-1 for what is felt, 0.5 for damage; written out it is the same allocation."""
    proposals, observations = weighed(second_round, generator)
    for word, power in (("calibrated", -1.0), ("damage", 0.5)):
        allocations = OneThreshold(importance=word), OneThreshold(importance=word, power=power)
        first, second = (each(proposals, observations, Systematic()) for each in allocations)
        for row in range(2):
            assert row_of(first, row) == row_of(second, row)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("one_threshold(importance=gradient)", "importance of one_threshold must be calibrated or damage or None"),
        ("one_threshold(power=-0.5)", "say which, like importance=damage"),
        ("one_threshold(importance=damage, power=9)", "a power between -8.0 and 8.0, not 9"),
    ],
)
def test_what_importance_cannot_be(said, error):
    with pytest.raises(PolicyError, match=error):
        Policy.parse(f"h2o+{said}/systematic/none@0.5")


def test_what_needs_a_table():
    assert OneThreshold().needs_calibration is None
    assert OneThreshold(importance="calibrated").needs_calibration == "gradient"
    assert OneThreshold(importance="damage").needs_calibration == "damage"
