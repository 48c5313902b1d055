"""Made entries: what a head holds in the place of what is gone."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch

from build import first_round, made_round, part, second_round
from kvest.budget import Entries
from kvest.correct import Counts, Inclusion, NoCorrection, Tempered
from kvest.policy import Policy
from kvest.propose import H2O, KeyDiff, KeyNorm, Mixed, Propose, Uniform, WithCertain
from kvest.random import Stream
from kvest.retain import Store, retain
from kvest.sample import TopK
from kvest.stand_in import Centroids, Merge, Moments, NoStandIn
from kvest.stand_in.centroids import ITERATIONS, _nearest, clusters
from kvest.types import Draw, Observation, Proposal, Retained
from outcomes import poisson, systematic
from reference import Head
from reference_standins import centroids, mean_query, merge, moments, sums, whole

every_round = pytest.mark.parametrize("make", [first_round, second_round, made_round])
FIXED = (
    "h2o(values=True)/top_k/none+centroids(3)@12",
    "h2o/systematic/inclusion+centroids(3, share=0.5)@12",
    "mixed(keydiff, 0.2)/systematic/tempered(0.85)+centroids(5, share=0.25)@12",
    "h2o(values=True)+one_threshold/systematic/inclusion+centroids(2, share=0.5, rows=7)@12",
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)+merge(0.5)@12",
    "h2o(values=True)+one_threshold/top_k/none+moments(at=mean)@12",
)


def evict(policy: Policy | str, observation: Observation, seed: int = 7) -> Retained:
    policy = Policy.parse(policy, sinks=2, window=3) if isinstance(policy, str) else policy
    rows = observation.keys.shape[0]
    return policy.evict([observation], [Stream(seed, 0, [3] * rows)])[0]


def held(kept: Retained, row: int, head: int):
    """(key, value, log weight) of all entries of one head."""
    store = Store(kept)
    parts = (store.head(x, row, head) for x in (store.keys, store.values, store.log_weights))
    return list(zip(*(x.double().tolist() for x in parts), strict=True))


def heads(observation: Observation):
    return itertools.product(range(observation.keys.shape[0]), range(observation.keys.shape[1]))


def close(got, want, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@every_round
@pytest.mark.parametrize("stand_in", [Centroids(3), Centroids(2, 0.5, 5)], ids=repr)
def test_centroids_are_the_twins(make, stand_in, generator):
    """Keys, values and log masses of every head; what was made before joins with all of its mass."""
    o = make(generator)
    design, correct = ("top_k", "none") if stand_in.share == 1 else ("systematic", "inclusion")
    policy = Policy.parse(f"h2o/{design}/{correct}@12", sinks=2, window=3, stand_in=stand_in)
    kept = evict(policy, o)
    for row, head in heads(o):
        entries, a = held(kept, row, head), Head(o, row, head)
        where = Store(kept).head(kept.positions, row, head).tolist()
        count = where.count(-1)
        assert count == stand_in.count
        assert where == sorted(where)
        stays = {i for i in a.entries if a.positions[i] >= 0 and a.positions[i] in where}
        assert len(stays) == len(where) - count
        want = centroids(a, stays, count, stand_in.share, stand_in.rows, ITERATIONS)
        for got, expected in zip(entries[:count], want, strict=True):
            for x, y in zip(got, expected, strict=True):
                close(x, y, 2e-4)


@every_round
@pytest.mark.parametrize("count", [1, 4])
def test_at_the_mean_query_nothing_is_lost(make, count, generator):
    """Numerator and denominator are those of the full cache, whatever the keys are."""
    o = make(generator)
    kept = evict(f"h2o/top_k/none+centroids({count}, rows=5)@9", o)
    for row, head in heads(o):
        a = Head(o, row, head)
        mu = mean_query(a, 5)
        close(sums(mu, o.scale, held(kept, row, head)), sums(mu, o.scale, whole(a)))


@pytest.mark.parametrize("make", [first_round, second_round, made_round])
def test_entries_of_equal_keys_are_stood_for_exactly(make, generator):
    """Whatever the query, the values and the number of centroids; no cluster is empty although all keys are equal."""
    o = make(generator)
    o = replace(o, keys=torch.where(o.valid[..., None], o.keys[:, :, -1:], o.keys))
    kept = evict("h2o/top_k/none+centroids(4)@12", o)
    assert kept.counts == ((12, 12, 12), (9, 9, 9))
    for row, head in heads(o):
        for q in torch.randn(3, 14, generator=generator).double().tolist():
            close(sums(q, o.scale, held(kept, row, head)), sums(q, o.scale, whole(Head(o, row, head))))


@pytest.mark.parametrize("correct", [Inclusion(), Counts(), Tempered(0.6)], ids=repr)
@pytest.mark.parametrize("outcomes", [poisson, systematic])
@pytest.mark.parametrize("share", [0.3, 0.75])
def test_the_expected_sums_are_those_of_the_formula(outcomes, correct, share, generator):
    """Over all outcomes, at the mean query: a kept entry counts 1 + (1 - share) (w - 1) times, an evicted one share
    times. With inclusion weights that is 1 in the mean: the full cache."""
    o = first_round(generator, lengths=(9,), sinks=0, window=1).head(0, 0)
    a, proposal = Head(o, 0, 0), replace(Mixed(KeyNorm(), 0.6)(o), certain=o.protected)
    mu = mean_query(a, 64)
    stand_in, total, want = (
        Centroids(2, share),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float64),
    )
    probabilities, draws = outcomes(proposal, o.valid, 5)
    for n, probability in enumerate(probabilities.tolist()):
        if probability == 0:
            continue
        draw = Draw(*(getattr(draws, f.name)[n : n + 1] for f in fields(Draw)))
        log_weights = correct(draw, o)
        stays = stand_in(draw, log_weights, o, torch.tensor([[2]]))
        kept = retain(stays.observation, draw, stays.log_weights, None, stays.made)
        total += probability * torch.tensor(sums(mu, o.scale, held(kept, 0, 0)), dtype=torch.float64)
        weight = log_weights[0, 0].double().exp().tolist()
        for i in a.entries:
            counted = 1 + (1 - share) * (weight[i] - 1) if draw.keep[0, 0, i] else share
            one = sums(mu, o.scale, [(a.k[i], a.v[i], a.l[i])])
            want += probability * counted * torch.tensor(one, dtype=torch.float64)
    close(total.tolist(), want.tolist(), 1e-5)
    full = torch.tensor(sums(mu, o.scale, whole(a)), dtype=torch.float64)
    assert torch.allclose(want, full, rtol=1e-6) == (correct != Tempered(0.6))


def test_in_a_head_without_a_sample_the_centroids_stand_for_all_and_without_centroids_the_sample(generator):
    o = first_round(generator, lengths=(23,))
    policy = Policy.parse("h2o/systematic/inclusion+centroids(4, share=0.3)@9", sinks=2, window=3)
    proposal, stand_in = policy.proposal(o), policy.stand_in
    counts = torch.tensor([[5, 8, 12]])  # certain: 5
    room = stand_in.room(proposal, o, counts)
    assert room.tolist() == [[0, 3, 4]]
    draw = policy.design(proposal, o.valid, counts - room, o.positions, Stream(0, 0, [0]))
    stays = stand_in(draw, Inclusion()(draw, o), o, room)
    assert stays.made is not None
    assert stays.made.counts.tolist() == [[0, 3, 4]]
    kept = retain(o, draw, stays.log_weights, None, stays.made)
    a = Head(o, 0, 1)
    mu = mean_query(a, 64)
    close(sums(mu, o.scale, held(kept, 0, 1)), sums(mu, o.scale, whole(a)))
    whole_weight = policy.design(proposal, o.valid, counts, o.positions, Stream(0, 0, [0]))
    nothing = stand_in(whole_weight, Inclusion()(whole_weight, o), o, torch.zeros_like(room))
    torch.testing.assert_close(nothing.log_weights, Inclusion()(whole_weight, o))
    assert nothing.made is None


@every_round
@pytest.mark.parametrize("budget", [(12, 9), (14, 14)])
@pytest.mark.parametrize("policy", FIXED)
def test_counts_are_those_of_the_allocation_and_certain_entries_stay(policy, budget, make, generator):
    """Made ones included; those of an earlier round are gone, and never among the kept; a head may keep all it has."""
    o = make(generator, budget=torch.tensor(budget))
    parsed = Policy.parse(policy, sinks=2, window=3)
    proposal = parsed.proposal(o)
    counts = parsed.allocate([proposal], [o], parsed.design)[0]
    kept = evict(parsed, o)
    assert torch.equal(torch.tensor(kept.counts), counts)
    for row, head in heads(o):
        where = Store(kept).head(kept.positions, row, head)
        certain = o.positions[row, head, proposal.certain[row, head]]
        assert (certain >= 0).all()
        assert torch.isin(certain, where).all()
        made = int((where < 0).sum())
        left = int(counts[row, head]) - len(certain)
        keeps_all = counts[row, head] == o.lengths[row, head]
        assert made == (int(o.made[row, head].sum()) if keeps_all else min(parsed.stand_in.most, left))
        assert (where[made:].diff() > 0).all()


@pytest.mark.parametrize("policy", [*FIXED, "h2o/poisson/inclusion+centroids(3, share=0.5)@12"])
def test_a_row_that_is_not_due_stays_as_it_is(policy, generator):
    o = made_round(generator)
    o = replace(o, due=torch.tensor([False, True]), budget=torch.tensor([23, 9]))
    kept = evict(policy, o)
    assert kept.counts[0] == tuple(o.lengths[0].tolist())
    for head in range(3):
        store, there = Store(kept), o.valid[0, head]
        for name in ("keys", "values", "log_weights", "positions"):
            assert torch.equal(
                store.head(getattr(kept, name), 0, head), getattr(o, name)[0, head, there].to(getattr(kept, name).dtype)
            )


@every_round
@pytest.mark.parametrize("policy", FIXED)
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_alone_equals_the_row_in_a_batch(policy, make, row, generator):
    o = make(generator)
    batch, alone = evict(policy, o), evict(policy, part(o, row))
    assert alone.counts[0] == batch.counts[row]
    for head in range(3):
        for name in ("keys", "values", "log_weights", "positions"):
            one, other = (Store(x).head(getattr(x, name), at, head) for x, at in ((alone, 0), (batch, row)))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mass_is_exact_for_keys_of_half_precision(dtype, generator):
    """It is that of the rounded centroid at the mean query."""
    o = second_round(generator)
    o = replace(o, **{n: getattr(o, n).to(dtype) for n in ("queries", "keys", "values")})
    kept = evict("h2o/top_k/none+centroids(3)@9", o)
    assert kept.keys.dtype == kept.values.dtype == dtype
    for row, head in heads(o):
        a = Head(o, row, head)
        mu = mean_query(a, 64)
        close(sums(mu, o.scale, held(kept, row, head))[-1], sums(mu, o.scale, whole(a))[-1])


@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_huge_logits_stay_finite(size, generator):
    o = made_round(generator)
    o = replace(o, **{n: getattr(o, n) * size for n in ("queries", "keys", "values")})
    kept = evict(FIXED[0], o)
    assert all(torch.isfinite(x).all() for x in (kept.keys, kept.values, kept.log_weights))


class Everything(Propose):
    """Certain of all that it sees."""

    def __call__(self, observation: Observation) -> Proposal:
        return Proposal(observation.valid.float(), observation.valid)


def test_made_entries_are_worth_nothing_and_never_certain(generator):
    """Not as sinks, not as the recent ones of a short row, not as what a proposal is certain of."""
    o = made_round(generator, sinks=4, window=60)
    proposal = Policy(Everything(), TopK(), NoCorrection(), Entries(20)).proposal(o)
    assert o.made.any()
    assert not proposal.certain[o.made].any()
    assert not proposal.score[o.made].any()
    assert not o.protected[o.made].any()


def test_made_entries_do_not_take_the_share_of_certain_ones(generator):
    o = made_round(generator)
    certain = WithCertain(Uniform(), KeyDiff(), 0.5)(o).certain
    assert not certain[o.made].any()
    assert (certain.sum(-1) == torch.tensor([[6], [4]])).all()


def test_a_standing_policy_keeps_the_history_of_kept_entries(generator):
    o = made_round(generator)
    policy = Policy.parse(FIXED[0], sinks=2, window=3, every=5)
    kept, proposal = evict(policy, o), policy.proposal(o)
    for row, head in heads(o):
        store = Store(kept)
        where, history = (store.head(x, row, head) for x in (kept.positions, kept.history))
        old = dict(zip(o.positions[row, head].tolist(), proposal.history[row, head].tolist(), strict=True))
        assert history.tolist() == [0.0 if p < 0 else old[p] for p in where.tolist()]


def test_a_centre_that_is_nearest_to_none_takes_an_entry_from_a_cluster_of_several(generator):
    """Not the one that is farthest from its centre, if that is alone there."""
    keys = torch.tensor([0.0, 0.0, 0.5, 0.0, 10.0])[None, :, None]
    centres = torch.tensor([0.0, 0.0, 7.0])[None, :, None]
    there = torch.tensor([[True, True, True, True, True]])
    assert _nearest(keys, centres, there, torch.tensor([3])).tolist() == [[0, 0, 1, 0, 2]]
    there[0, 2] = False
    labels = _nearest(keys, centres, there, torch.tensor([3]))
    assert labels[there].unique().tolist() == [0, 1, 2]
    assert labels[0, 0] == 0


def test_no_cluster_is_empty(generator):
    """Two keys a hundred times each: three clusters all the same, and equal keys stay together as far as they can."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(50, 1)[None]
    there = torch.ones(1, 100, dtype=torch.bool)
    labels = clusters(keys, torch.ones(1, 100), there, torch.tensor([3]), 3)
    assert labels.unique().tolist() == [0, 1, 2]
    for c in range(3):
        assert keys[labels == c].unique(dim=0).shape[0] == 1


def test_heads_that_make_none_are_as_without(generator):
    """A budget that is all sinks and window: nothing is made."""
    o = first_round(generator, budget=torch.tensor([5, 5]))
    made, plain = evict("h2o/top_k/none+centroids(4)@5", o), evict("h2o/top_k/none@5", o)
    for f in ("keys", "values", "log_weights", "positions", "counts"):
        one, other = getattr(made, f), getattr(plain, f)
        assert one == other if f == "counts" else torch.equal(one, other)


@every_round
@pytest.mark.parametrize("stand_in", [Merge(), Merge(0.55), Merge(0.5, keys=False), Merge(1.0)], ids=repr)
def test_merged_entries_are_the_twins(make, stand_in, generator):
    """As many entries, positions and weights as without; an entry that nothing is merged into stays bit for bit."""
    o = make(generator)
    o = replace(o, keys=o.keys - 1)  # all alike otherwise
    text = "h2o/systematic/inclusion@12"
    kept = evict(Policy.parse(text, sinks=2, window=3, stand_in=stand_in), o)
    plain = evict(text, o)
    assert kept.counts == plain.counts
    assert torch.equal(kept.positions, plain.positions)
    assert torch.equal(kept.log_weights, plain.log_weights)
    assert torch.equal(kept.keys, plain.keys) == (stand_in.threshold == 1.0 or not stand_in.keys)
    assert torch.equal(kept.values, plain.values) == (stand_in.threshold == 1.0)
    assert (kept.values == plain.values).all(dim=1).any()
    for row, head in heads(o):
        a, where = Head(o, row, head), Store(kept).head(kept.positions, row, head).tolist()
        slots = [i for i in a.entries if a.positions[i] in where and a.positions[i] >= 0]
        want = merge(a, set(slots), stand_in.threshold, stand_in.keys)
        for slot, (key, value, _) in zip(slots, held(kept, row, head), strict=True):
            close(key, want[slot][0])
            close(value, want[slot][1])


@pytest.mark.parametrize(("module", "stand_in"), [("merge", "merge(0.3)"), ("centroids", "centroids(3)")])
def test_little_memory_gives_the_same_result(module, stand_in, generator, monkeypatch):
    """A few entries, or one head, at a time."""
    o, text = second_round(generator), f"h2o/top_k/none+{stand_in}@12"
    at_once = evict(text, o)
    monkeypatch.setattr(f"kvest.stand_in.{module}.BLOCK_ELEMENTS", 25)
    for name in ("keys", "values", "log_weights"):
        torch.testing.assert_close(getattr(evict(text, o), name), getattr(at_once, name))


def answer(kept: Retained, row: int, head: int, q: list[float], scale: float) -> torch.Tensor:
    """Numerator and denominator of attention over what a head holds, the slope of its first entry included."""
    entries = held(kept, row, head)
    key, value, weight = entries[0]
    first = torch.tensor(value).double() + kept.slopes[row, head].double() @ torch.tensor(q, dtype=torch.float64)
    return torch.tensor(sums(q, scale, [(key, first.tolist(), weight), *entries[1:]]), dtype=torch.float64)


@every_round
@pytest.mark.parametrize("stand_in", [Moments(), Moments("mean"), Moments("mean", 5)], ids=repr)
def test_moments_are_the_twins(make, stand_in, generator):
    """For any query: numerator and denominator of what is kept, and of the expansion of what is gone."""
    o = make(generator)
    kept = evict(Policy.parse("h2o/top_k/none@12", sinks=2, window=3, stand_in=stand_in), o)
    for row, head in heads(o):
        a, where = Head(o, row, head), Store(kept).head(kept.positions, row, head).tolist()
        assert where.count(-1) == 1
        stays = {i for i in a.entries if a.positions[i] >= 0 and a.positions[i] in where}
        mu = mean_query(a, stand_in.rows) if stand_in.at == "mean" else [0.0] * len(a.k[0])
        for q in (mu, *torch.randn(3, 14, generator=generator).double().tolist()):
            want = sums(q, o.scale, [(a.k[i], a.v[i], a.l[i]) for i in stays])
            gone = moments(a, set(a.entries) - stays, mu, q)
            close(answer(kept, row, head, q, o.scale).tolist(), [x + y for x, y in zip(want, gone, strict=True)], 1e-4)


@pytest.mark.parametrize("at", ["zero", "mean"])
def test_moments_add_up_over_rounds(at, generator):
    """At one and the same query two rounds are one: the entry that was made is expanded with its slope."""
    o = first_round(generator, lengths=(23,), budget=torch.tensor([15]))
    policy = Policy.parse(f"h2o/top_k/none+moments(at={at}, rows=5)@12", sinks=2, window=3)
    first = evict(policy, o)
    slots, lengths = Store(first).right_aligned()
    again = replace(
        o,
        **{n: getattr(first, n)[slots] for n in ("keys", "values", "log_weights")},
        positions=first.positions[slots].long(),
        lengths=lengths,
        slopes=first.slopes,
        prepared=None,
        budget=torch.tensor([9]),
        queries=o.queries[:, :, :, -5:],
        query_lengths=torch.tensor([5]),
    )
    second = evict(policy, again)
    for head in range(3):
        a, where = Head(o, 0, head), Store(second).head(second.positions, 0, head).tolist()
        mu = mean_query(a, 5) if at == "mean" else [0.0] * 14
        gone = {i for i in a.entries if a.positions[i] not in where}
        assert len(gone) == 15
        for q in (mu, *torch.randn(2, 14, generator=generator).double().tolist()):
            kept = sums(q, o.scale, [(a.k[i], a.v[i], a.l[i]) for i in a.entries if i not in gone])
            want = [x + y for x, y in zip(kept, moments(a, gone, mu, q), strict=True)]
            close(answer(second, 0, head, q, o.scale).tolist(), want, 1e-4)


def test_a_head_that_keeps_all_keeps_its_slope(generator):
    o = made_round(generator, budget=torch.tensor([14, 14]))
    o = replace(o, slopes=torch.randn(2, 3, 7, 14, generator=generator))
    kept = evict("h2o/top_k/none+moments@12", o)
    for row, head in heads(o):
        same = torch.equal(kept.slopes[row, head], o.slopes[row, head])
        assert same == bool(o.lengths[row, head] <= 14 and o.made[row, head].any())
    assert not kept.slopes[1, 2].any()  # keeps all, and had none made
    assert kept.slopes[1, 0].any()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h2o/top_k/none+centroids(4, share=0.5)@0.25", "top_k/none gives none: leave share out"),
        ("h2o/systematic/none+centroids(4, share=0.5)@0.25", "write /systematic/inclusion"),
        ("h2o/top_k/none+centroids(0)@0.25", "whole number count >= 1, not 0"),
        ("h2o/top_k/none+centroids(1, rows=0)@0.25", "whole number rows >= 1, not 0"),
        ("h2o/systematic/inclusion+centroids(1, share=0.0)@0.25", "0 < share <= 1, not 0.0"),
        ("h2o/top_k/none+moments(rows=0)@0.25", "whole number rows >= 1, not 0"),
        ("h2o/top_k/none+moments(at=end)@0.25", "at of moments must be zero or mean"),
        ("h2o/top_k/none+merge(1.5)@0.25", "-1 <= threshold <= 1, or None for the mean, not 1.5"),
        ("h2o/top_k/none+centroid@0.25", "Did you mean 'centroids'?"),
        ("h2o/top_k/none+@0.25", "expected a stand-in here"),
    ],
)
def test_what_does_not_go_together_is_said(text, says):
    with pytest.raises(ValueError, match="(?s).*" + says.replace("(", r"\(").replace("?", r"\?").replace("+", r"\+")):
        Policy.parse(text)


def test_a_stand_in_is_written_only_where_there_is_one():
    assert str(Policy.parse("h2o/top_k/none+none@0.25")) == "h2o/top_k/none@0.25"
    assert Policy.parse("h2o/top_k/none+none@0.25").stand_in == NoStandIn()
    assert str(Policy.parse("h2o/top_k/none + centroids @ 0.25")) == "h2o/top_k/none+centroids(8)@0.25"
    assert Policy(H2O(), TopK(), NoCorrection(), Entries(20), sinks=1, window=1).queries is None
    assert Policy.parse("snapkv(11)/top_k/none+centroids(8)@0.25").queries == 64
    assert Policy.parse("snapkv(80)/top_k/none+centroids(8)@0.25").queries == 80
