"""Designs against all their outcomes: stratified, pivotal, clusters, pareto, best_of."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import reference_designs as twins
import reference_sampling
from build import first_round, part, second_round
from kvest.allocate import OneThreshold
from kvest.correct import Counts, Inclusion, NoCorrection, Tempered
from kvest.policy import Policy
from kvest.propose import H2O, KeyNorm, Mixed
from kvest.random import Stream
from kvest.sample import BestOf, Clusters, Pareto, Pivotal, Poisson, Stratified, Systematic, TopK, WithReplacement
from kvest.types import Proposal
from outcomes import drawn, expect, proposal

EXACT = {"rtol": 0, "atol": 1e-12}
TAILED = [0.9, 0.05, 3.0, 1.7, 0.31, 40.0, 0.6, 1.1]  # one entry reaches probability 1 by itself
every_round = pytest.mark.parametrize("make", [first_round, second_round])
CASES = [
    (TAILED, (), 0, 4),
    (TAILED, (1, 7), 3, 6),
    (TAILED, (), 0, 1),
    ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], (), 2, 3),  # borders of cells are borders of entries
    ([2.0, 1.9, 2.1, 1.8, 2.2, 1.7, 0.2], (), 1, 6),  # most entries lie across a border
    ([1.0, 3.0, 0.0, 2.0, 0.5, 0.0, 4.0, 1.5, 1.0], (), 0, 5),
]


def stated(design, made, valid, count) -> torch.Tensor:
    return drawn(design, made, valid, count, torch.zeros(1, 1, 1)).inclusion[0, 0]


def stratified(made, valid, count) -> tuple[torch.Tensor, torch.Tensor]:
    """(probability of each outcome, kept): in each cell a number between any two where what is drawn may change."""
    pi = stated(Stratified(), made, valid, count)
    ends = [0.0, *pi.masked_fill(pi >= 1, 0).cumsum(0).tolist()]
    breaks = []
    for cell in range(round(ends[-1])):
        k = next(i for i, end in enumerate(ends) if end >= cell - 1e-12)
        behind, before = ends[k] - cell, cell - ends[k - 1]
        again = behind / (1 - before) if cell else 0.0
        behind = behind if cell else 0.0
        inner = [(e - cell - behind) / (1 - behind) for e in ends if cell + behind < e < cell + 1]
        found = {0.0, 1.0, again, *inner, *(again + (1 - again) * x for x in inner)}
        breaks.append(torch.tensor(sorted(x for x in found if 0 <= x <= 1), dtype=torch.float64))
    middles = torch.cartesian_prod(*[(x[1:] + x[:-1]) / 2 for x in breaks]).reshape(-1, len(breaks))
    widths = torch.cartesian_prod(*[x.diff() for x in breaks]).reshape(-1, len(breaks))
    return widths.prod(-1), drawn(Stratified(), made, valid, count, middles[:, None]).keep


@pytest.mark.parametrize(("scores", "certain", "missing", "count"), CASES)
def test_stratified_is_the_ordered_pivotal_method(scores, certain, missing, count):
    """Every sample has the probability that duels in the order of entries give it (Chauvet 2012), and its size."""
    made, valid = proposal(scores, certain, missing)
    pi = stated(Stratified(), made, valid, count)
    probability, keep = stratified(made, valid, count)
    torch.testing.assert_close(probability.sum(), torch.tensor(1.0, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(expect(probability, keep), pi, **EXACT)
    assert (keep[probability > 1e-13].sum(-1) == count).all()
    open_ = ((pi < 1) & (pi > 0)).nonzero()[:, 0].tolist()
    want = twins.ordered_pivotal(pi[open_].tolist())
    got: dict[tuple[int, ...], float] = {}
    for chance, kept in zip(probability.tolist(), keep[:, 0, open_].tolist(), strict=True):
        sample = tuple(i for i, k in enumerate(kept) if k)
        got[sample] = got.get(sample, 0.0) + chance
    assert {s for s, p in got.items() if p > 1e-12} == {s for s, p in want.items() if p > 1e-12}
    assert all(abs(got.get(sample, 0.0) - p) < 1e-12 for sample, p in want.items())


@pytest.mark.parametrize(("scores", "certain", "missing", "count"), CASES)
def test_pivotal_duels_as_its_twin_does(scores, certain, missing, count):
    """All results of all duels, each number a hair below or above its chance; together exactly pi."""
    made, valid = proposal(scores, certain, missing)
    pi = stated(Pivotal(), made, valid, count)
    slots = len(pi)
    rounds = (slots - 1).bit_length()
    duels = [(turn, n) for turn in range(rounds) for n in range((1 << rounds) >> (turn + 1))]
    total = torch.zeros_like(pi)
    numbers, samples, chances = [], [], []
    seen = set()
    for results in itertools.product((True, False), repeat=len(duels)):
        decided = dict(zip(duels, results, strict=True))
        kept, chance = twins.tournament(pi.tolist(), lambda turn, n, decided=decided: decided[turn, n])
        probability, row = 1.0, torch.zeros(1 << rounds, dtype=torch.float64)
        for (turn, n), first in decided.items():
            p = chance[turn, n]
            probability *= p if first else 1 - p
            row[n * (2 << turn) + (1 << turn) - 1] = p * (1 - 1e-9) if first else p + (1 - p) * 1e-9
        if probability <= 1e-15 or (kept, tuple(row.tolist())) in seen:
            continue
        seen.add((kept, tuple(row.tolist())))
        numbers.append(row)
        samples.append(kept)
        chances.append(probability)
        total[list(kept)] += probability
    torch.testing.assert_close(total, pi, **EXACT)
    assert abs(sum(chances) - 1) < 1e-12
    keep = drawn(Pivotal(), made, valid, count, torch.stack(numbers)[:, None]).keep[:, 0]
    assert [tuple(row.nonzero()[:, 0].tolist()) for row in keep] == samples
    assert (keep.sum(-1) == count).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_pareto_keeps_entries_nearly_as_often_as_it_says(count):
    """Frequencies over 40,000 draws against pi: off by no more than 0.014, where sum pi (1 - pi) is 0.5 to 1.3.

    The standard error is at most 0.0025: five of them are added. 5 x 8 comparisons at 5.7e-7: 2.3e-5 in all.
    """
    n, scores = 40_000, [0.9, 0.35, 3.0, 1.7, 0.31, 1.4, 0.6, 1.1]
    made, valid = proposal(scores, (), 0)
    pi = stated(Pareto(), made, valid, count)
    u = Stream(3, count, [0]).uniform(torch.arange(8 * n)[None, None]).view(n, 1, 8)
    keep = drawn(Pareto(), made, valid, count, u).keep
    assert (keep.sum(-1) == count).all()
    off = (keep[:, 0].double().mean(0) - pi).abs().max()
    assert off < 0.014 + 5 * 0.0025


def test_pareto_ranks_by_odds():
    """By the definition, in a loop; certain entries and those of probability 1 first."""
    made, valid = proposal(TAILED, (1,), 2)
    pi = stated(Pareto(), made, valid, 5)
    u = Stream(1, 0, [0]).uniform(torch.arange(10 * 97)[None, None]).view(97, 1, 10)
    keep = drawn(Pareto(), made, valid, 5, u).keep[:, 0]
    for row, numbers in zip(keep, u[:, 0].tolist(), strict=True):
        rank = {}
        for i, (x, p) in enumerate(zip(numbers, pi.tolist(), strict=True)):
            if p > 0:
                rank[i] = -1.0 if p == 1 else (x / (1 - x)) / (p / (1 - p))
        assert row.nonzero()[:, 0].tolist() == sorted(sorted(rank, key=rank.__getitem__)[:5])


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("inner", [Systematic(), Poisson(), WithReplacement(), Pivotal()], ids=repr)
@every_round
def test_members_of_a_cluster_are_kept_together(inner, size, make, generator):
    """With one probability, that of the inner design given the clusters' sums; the expected number is the count."""
    o = make(generator)
    made = replace(Mixed(H2O())(o), certain=o.protected)
    counts = o.budget[:, None].expand(2, 3)
    draw = Clusters(inner, size)(made, o.valid, counts, o.positions, Stream(7, 1, [0, 2]))
    together = 0
    for row, head in itertools.product(range(2), range(3)):
        open_ = (o.valid & ~made.certain)[row, head]
        x, positions = made.score[row, head][open_].double(), o.positions[row, head][open_].tolist()
        keep, pi = draw.keep[row, head][open_], draw.inclusion[row, head][open_]
        for cluster in {p // size for p in positions}:
            mine = torch.tensor([p // size == cluster for p in positions])
            assert len(keep[mine].unique()) == 1
            assert float(pi[mine].max() - pi[mine].min()) < 1e-12
            together += int(mine.sum() > 1)
        m = int(counts[row, head] - made.certain[row, head].sum())
        assert abs(float(pi.sum()) - m) < 1e-9
        want = expected_inclusion(inner, (x / x.sum()).tolist(), positions, size, m)
        torch.testing.assert_close(pi, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert together > 6


def expected_inclusion(inner, x: list[float], positions: list[int], size: int, m: int) -> list[float]:
    """The mixture of n and n + 1 clusters whose expected number of entries is m."""

    def at(n: int) -> list[float]:
        def rate(scores: list[float]) -> list[float]:
            if n == 0:
                return [0.0] * len(scores)
            if isinstance(inner, WithReplacement):
                return reference_sampling.distinct(scores, reference_sampling.draws_for(scores, n))
            return reference_sampling.inclusion(scores, n)

        return twins.clustered(x, positions, size, rate)

    n = max(n for n in range(len({p // size for p in positions}) + 1) if sum(at(n)) <= m + 1e-9)
    low, high = at(n), at(min(n + 1, len({p // size for p in positions})))
    share = (m - sum(low)) / (sum(high) - sum(low)) if sum(high) > sum(low) else 0.0
    return [(1 - share) * a + share * b for a, b in zip(low, high, strict=True)]


@every_round
def test_clusters_are_kept_as_often_as_they_say(make, generator):
    """Frequencies over 4,000 streams within 5.5 standard errors, and so are the numbers kept around the count.

    At most 138 + 12 comparisons at 3.8e-8: passed by chance but for 5.7e-6.
    """
    o, n = part(make(generator), 0), 4000
    made = Mixed(H2O())(o)
    t = o.keys.shape[2]
    wide = Proposal(made.score.expand(n, 3, t), o.protected.expand(n, 3, t))
    counts = o.budget[:, None].expand(n, 3)
    valid, positions = o.valid.expand(n, 3, t), o.positions.expand(n, 3, t)
    for inner in (Systematic(), Stratified()):
        draw = Clusters(inner, 4)(wide, valid, counts, positions, Stream(5, 0, list(range(n))))
        pi = draw.inclusion[0]
        error = (pi * (1 - pi) / n).sqrt()
        assert ((draw.keep.double().mean(0) - pi).abs() <= 5.5 * error + 1e-12).all()
        kept = draw.keep.sum(-1).double()
        assert ((kept.mean(0) - o.budget[0]).abs() < 5.5 * kept.std(0) / math.sqrt(n) + 1e-12).all()
        assert (kept.std(0) > 0).any()


def test_clusters_of_a_design_without_chance_are_the_best_that_fit(generator):
    o = second_round(generator)
    made = replace(H2O(values=True)(o), certain=o.protected)
    design = Clusters(TopK(), 4)
    assert not design.random
    counts = o.budget[:, None].expand(2, 3)
    draw = design(made, o.valid, counts, o.positions, Stream(0, 0, [0, 0]))
    for row, head in itertools.product(range(2), range(3)):
        open_ = (o.valid & ~made.certain)[row, head].nonzero()[:, 0].tolist()
        where = {i: int(o.positions[row, head, i]) // 4 for i in open_}
        mass = {c: sum(float(made.score[row, head, i]) for i in open_ if where[i] == c) for c in where.values()}
        room, kept = int(counts[row, head] - made.certain[row, head].sum()), set()
        for c in sorted(mass, key=mass.__getitem__, reverse=True):
            members = {i for i in open_ if where[i] == c}
            if len(kept | members) > room:
                break
            kept |= members
        assert set((draw.keep & ~made.certain)[row, head].nonzero()[:, 0].tolist()) == kept
        assert torch.equal(draw.inclusion[row, head], draw.keep[row, head].double())


@every_round
def test_clusters_compete_by_one_threshold(make, generator):
    """One rate for the clusters of all heads: their expected entries are the counts, up to rounding."""
    observations = [make(generator) for _ in range(2)]
    proposals = [replace(Mixed(H2O())(o), certain=o.protected) for o in observations]
    counts = OneThreshold()(proposals, observations, Clusters(Systematic(), 4))
    for row in range(2):
        heads = []
        for p, o, c in zip(proposals, observations, counts, strict=True):
            for head in range(3):
                open_ = (o.valid & ~p.certain)[row, head]
                x = p.score[row, head][open_].double()
                got = int(c[row, head] - p.certain[row, head].sum())
                heads.append(((x / x.sum()).tolist(), o.positions[row, head][open_].tolist(), got))

        def wanted(rate: float, heads=heads) -> list[float]:
            def at(scores: list[float]) -> list[float]:
                return [min(1.0, rate * s) for s in scores]

            return [sum(twins.clustered(x, positions, 4, at)) for x, positions, _ in heads]

        total, low, high = sum(got for _, _, got in heads), 0.0, 1e12
        assert total + sum(int(p.certain[row].sum()) for p in proposals) == 6 * int(observations[0].budget[row])
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(wanted(middle)) < total else (low, middle)
        assert all(abs(n - w) < 1 + 1e-6 for (_, _, n), w in zip(heads, wanted(high), strict=True))


def errors_of(o, made, design, correct, counts, stream, rows) -> torch.Tensor:
    """Relative squared error on the last `rows` queries, summed over them, in a loop."""
    draw = design(made, o.valid, counts, o.positions, stream)
    log_w = correct(draw, o)
    out = torch.zeros(counts.shape, dtype=torch.float64)
    for row, head in itertools.product(range(2), range(3)):
        a = reference_sampling.Head(o, row, head)
        for j, g in itertools.product(a.asked[-rows:], a.groups):
            p = a.p(g, j)
            exact = a.output(p)
            kept = {i: x * math.exp(log_w[row, head, i]) for i, x in p.items() if draw.keep[row, head, i]}
            total = sum(kept.values())
            got = a.output({i: x / total for i, x in kept.items()}) if kept else [0.0] * len(exact)
            moved = reference_sampling.norm([x - y for x, y in zip(got, exact, strict=True)])
            out[row, head] += (moved / reference_sampling.norm(exact)) ** 2
    return out


@every_round
@pytest.mark.parametrize("correct", [Inclusion(), Counts(), NoCorrection(), Tempered("auto")], ids=repr)
def test_best_of_keeps_the_draw_of_least_error(correct, make, generator):
    """For each head by itself, of draws from streams that are told apart by their attempt."""
    o = make(generator)
    made = replace(Mixed(KeyNorm(), 0.3)(o), certain=o.protected)
    counts, inner = o.budget[:, None].expand(2, 3), WithReplacement()
    stream = Stream(11, 1, [0, 2])
    draw, log_w = BestOf(inner, n=5, rows=6).corrected(made, o, o.valid, counts, stream, correct)
    tries = [replace(stream, attempt=n) for n in range(5)]
    found = torch.stack([errors_of(o, made, inner, correct, counts, each, 6) for each in tries]).argmin(0)
    assert len(found.unique()) > 1
    for row, head in itertools.product(range(2), range(3)):
        want = inner(made, o.valid, counts, o.positions, tries[int(found[row, head])])
        for name in ("keep", "inclusion", "multiplicity", "expected"):
            assert torch.equal(getattr(draw, name)[row, head], getattr(want, name)[row, head])
        assert torch.equal(log_w[row, head], correct(want, o)[row, head])


def test_best_of_one_is_the_design_itself(generator):
    o = second_round(generator)
    text = "h2o(values=True)/{}/inclusion@0.5, every=3"
    (plain,) = Policy.parse(text.format("systematic")).evict([o], [Stream(3, 0, [1, 4])])
    (one,) = Policy.parse(text.format("best_of(systematic, n=1)")).evict([o], [Stream(3, 0, [1, 4])])
    (many,) = Policy.parse(text.format("best_of(systematic)")).evict([o], [Stream(3, 0, [1, 4])])
    assert torch.equal(plain.positions, one.positions)
    assert many.positions.shape == one.positions.shape
    assert not torch.equal(many.positions, one.positions)


def test_a_policy_remembers_the_queries_that_its_design_looks_at():
    assert Policy.parse("snapkv/systematic/inclusion@0.5").looks_back == 0
    assert Policy.parse("snapkv/best_of(systematic, rows=48)/inclusion@0.5").looks_back == 48
    assert Policy.parse("snapkv/best_of(systematic, rows=48)/tempered(auto, rows=96)@0.5").looks_back == 96
    assert Policy.parse("snapkv/systematic/tempered(auto)@0.5").looks_back == 64


def test_attempts_are_unrelated_and_the_first_is_the_stream_itself():
    """Correlation of neighbouring attempts within 5.5 standard errors: 3 comparisons at 3.8e-8."""
    index = torch.arange(4999)[None, None]
    stream = Stream(11, 3, [1])
    assert torch.equal(replace(stream, attempt=0).uniform(index), stream.uniform(index))
    u = torch.stack([replace(stream, attempt=n).uniform(index)[0, 0] for n in range(3)])
    correlation = torch.corrcoef(u) - torch.eye(3)
    assert correlation.abs().max() * math.sqrt(4999) < 5.5


@pytest.mark.parametrize("design", [Stratified(), Pivotal(), Pareto(), Clusters(Pivotal(), 3)], ids=repr)
def test_long_and_peaked_heads_keep_their_count(design, generator):
    """977 entries of very different sizes, sums that are far from whole numbers before they are rounded."""
    for power in (0.0, 1.0, 9.0):
        score = torch.rand(7, 1, 977, generator=generator) ** power
        made, valid = proposal([1.0] * 977)
        wide = replace(made, score=score, certain=made.certain.expand(7, 1, 977))
        for count in (1, 331, 976):
            counts, positions = torch.full((7, 1), count), torch.arange(977).expand(7, 1, 977)
            draw = design(wide, valid.expand(7, 1, 977), counts, positions, Stream(1, 2, list(range(7))))
            if design.fixed_size:
                assert draw.keep.sum(-1).tolist() == [[count]] * 7
            torch.testing.assert_close(draw.inclusion.sum(-1), counts.double(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Clusters(Systematic(), 0), "clusters needs a size that is a whole number of at least 1, not 0"),
        (lambda: Clusters(BestOf(Systematic())), r"write best_of\(clusters\(...\)\)"),
        (lambda: BestOf(TopK()), "best_of needs a random design, like systematic"),
        (lambda: BestOf(Clusters(TopK())), "best_of needs a random design"),
        (lambda: BestOf(Systematic(), n=0), "best_of needs n to be a whole number of at least 1, not 0"),
        (lambda: BestOf(Systematic(), rows=0), "best_of needs rows to be a whole number of at least 1, not 0"),
        (lambda: BestOf(BestOf(Systematic())), "best_of chooses once"),
    ],
)
def test_what_makes_no_design_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
