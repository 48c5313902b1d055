"""Scores of keys, values and moments against their twins: a loop over entries, in float64 (`reference_scores.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
import reference_scores as twins
from build import first_round, made_round, part, second_round
from kvest.propose import (
    CapKV,
    CapKVGreedy,
    Compactor,
    CurDKV,
    ExpectedAttention,
    LagKV,
    Lava,
    Leverage,
    MomentResidual,
    NonCausal,
    ValueNorm,
    ValueRange,
)
from kvest.propose import expected_attention as expected
from kvest.random import Stream, gaussian
from kvest.sample import TopK

TABLE = {
    twins.value_norm: [ValueNorm()],
    twins.value_range: [ValueRange()],
    twins.lagkv: [LagKV(), LagKV(5), LagKV(3), LagKV(5, peer=True), LagKV(9, peer=True)],
    twins.expected_attention: [
        ExpectedAttention(),
        ExpectedAttention(ahead=7, covariance=False),
        ExpectedAttention(ahead=17, values=False, eps=0.01),
        ExpectedAttention(ahead=17, peer=True),
    ],
    twins.leverage: [Leverage(), Leverage(sketch=5, ridge=0.3), Leverage(sketch=13, seed=7)],
    twins.noncausal: [
        NonCausal(),
        NonCausal(5),
        NonCausal(16),
        NonCausal(1),
        NonCausal(7, peer=True),
        NonCausal(peer=True),
    ],
    twins.compactor: [Compactor(), Compactor(blend=1.3, sketch=5, ridge=0.1, chunk=7, seed=3)],
    twins.curdkv: [CurDKV(), CurDKV(rank=3, seed=11), CurDKV(peer=True)],
    twins.moment_residual: [MomentResidual(), MomentResidual(window=5)],
    twins.lava: [Lava(), Lava(window=5, pool=3), Lava(window=9, pool=1)],
    twins.capkv_greedy: [CapKVGreedy(ahead=17), CapKVGreedy(tau=2.0, ahead=3), CapKVGreedy("paper", tau=0.1)],
}
CASES = [(propose, twin) for twin, proposals in TABLE.items() for propose in proposals]
every_round = pytest.mark.parametrize("make", [first_round, second_round, made_round])


@every_round
@pytest.mark.parametrize(("propose", "twin"), CASES, ids=[repr(propose) for propose, _ in CASES])
def test_score_equals_its_twin(propose, twin, make, generator):
    """Fault 12: in the first round with padding, in a second with gaps, weights and uneven heads, some entries made."""
    observation = make(generator, layer=2)
    got = propose(observation).score.masked_fill(observation.made, 0.0)
    want = reference.score(twin, observation, **vars(propose)).masked_fill(observation.made, 0.0)
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=1e-6)


@every_round
def test_compactor_is_certain_of_both_ends_as_far_as_there_is_room(make, generator):
    """The first 8 positions and the last 4, beside sinks and window; in the order of positions."""
    for budget in (5, 9, 12, 40):
        observation = make(generator, budget=torch.tensor([budget, budget + 1]), sinks=2, window=3)
        got = Compactor()(observation).certain
        want = reference.score(twins.compactor_certain, observation)
        assert torch.equal(got, want.bool())
        assert ((got | observation.protected).sum(-1) <= observation.budget[:, None]).all()


GREEDY = pytest.mark.parametrize("propose", [CapKVGreedy(ahead=17), CapKVGreedy("paper", tau=0.1)], ids=repr)


def kept_by(propose, observation):
    """What top_k keeps under the budget, sinks and window included."""
    proposal = replace(propose(observation), certain=observation.protected)
    counts = observation.budget[:, None].expand(observation.lengths.shape)
    return TopK()(
        proposal, observation.valid & ~observation.made, counts, observation.positions, Stream(0, 0, [0, 0])
    ).keep


@every_round
@GREEDY
def test_top_k_keeps_what_greedy_selection_chose(propose, make, generator):
    observation = make(generator)
    kept = kept_by(propose, observation)
    for row in range(2):
        for head in range(3):
            a = reference.Head(observation, row, head)
            protected = reference.protected(a)
            score = twins.capkv_greedy(a, **vars(propose))
            best = sorted(set(score) - protected, key=score.__getitem__, reverse=True)
            chosen = protected | set(best[: a.budget - len(protected)])
            assert set(kept[row, head].nonzero()[:, 0].tolist()) == chosen


@GREEDY
def test_greedy_selection_has_more_capacity_than_a_ranking_where_entries_repeat(propose, generator):
    """By what is lost without them, two equal entries both go, or both stay."""
    observation = first_round(generator, lengths=(23, 21))
    values = observation.values[:, :, torch.arange(23) // 2]
    observation = replace(observation, values=values)
    capacity = []
    for one in (propose, CapKV(propose.form, propose.tau, propose.ahead)):
        kept, total = kept_by(one, observation), 0.0
        for row in range(2):
            for head in range(3):
                a = reference.Head(observation, row, head)
                weights = twins.capkv_weights(a, **vars(propose))
                rows = {i: w**0.5 * torch.tensor(a.v[i], dtype=torch.float64) for i, w in weights.items()}
                total += twins.capacity(rows, [i for i in rows if kept[row, head, i]])
        capacity.append(total)
    greedy, ranked = capacity
    assert greedy > ranked + 0.1


def test_greedy_selection_of_many_equal_entries_stays_exact(generator):
    """A hundred choices later the updates agree with the capacity computed anew."""
    observation = first_round(generator, lengths=(151,), budget=torch.tensor([130]))
    values = observation.values[:, :, torch.arange(151) % 13] * 100.0
    observation = replace(observation, values=values)
    got = CapKVGreedy(ahead=3)(observation).score.double()
    weights = twins.capkv_weights(reference.Head(observation, 0, 1), "authors", 5.0, 3)
    free = [i for i in weights if not observation.protected[0, 1, i]]
    order = sorted(free, key=lambda i: -got[0, 1, i])
    rows = {i: w**0.5 * values[0, 1, i].double() for i, w in weights.items()}
    begun = [i for i in weights if observation.protected[0, 1, i]]
    for n in (0, 1, 57, 110):
        taken = begun + order[:n]
        growth = {i: twins.capacity(rows, [*taken, i]) - twins.capacity(rows, taken) for i in order[n:]}
        best = max(growth.values())
        torch.testing.assert_close(float(got[0, 1, order[n]]), best, rtol=1e-4, atol=0)
        assert growth[order[n]] >= best * (1 - 1e-4)


def test_queries_some_at_a_time_have_the_moments_of_all_at_once(generator, monkeypatch):
    """Padding may fill the first pieces, and sinks part of one."""
    observation = first_round(generator, lengths=(23, 5))
    whole = ExpectedAttention(ahead=7)(observation).score
    monkeypatch.setattr(expected, "ELEMENTS", 3 * 5 * 14)
    torch.testing.assert_close(ExpectedAttention(ahead=7)(observation).score, whole, rtol=1e-5, atol=1e-7)


def test_expected_attention_of_a_prompt_within_the_sinks_uses_all_its_queries(generator):
    observation = first_round(generator, lengths=(3,))
    got = ExpectedAttention(covariance=False)(observation).score
    moved = ExpectedAttention(covariance=False)(replace(observation, queries=observation.queries + 1)).score
    assert (got - moved).abs().max() > 0.01
    assert torch.isfinite(ExpectedAttention(peer=True)(observation).score).all()


def test_equal_entries_of_a_lag_share_the_lower_rank(generator):
    """Two lags of 4 after 2 sinks, and a rest of 3: the first lag is ranked, the others have no next lag to compare."""
    observation = first_round(generator, lengths=(13,))
    keys, values = observation.keys.clone(), observation.values.clone()
    for x in (keys, values):
        x[:, :, 2:4] = 0.0  # inside the next lag's range, one of them more so
        x[:, :, 3] += 0.5
        x[:, :, 4:6] = torch.linspace(-90, 90, x.shape[-1])  # far outside, and equal
    score = LagKV(4)(replace(observation, keys=keys, values=values)).score
    assert score[0, 1, 4:6].tolist() == pytest.approx([0.6, 0.6])
    assert sorted(score[0, 1, 2:4].tolist()) == pytest.approx([0.2, 0.4])
    assert (score[0, 1, :2] == 1).all()
    assert (score[0, 1, 6:] == 1).all()


def test_a_channel_that_is_constant_over_the_next_lag_counts_0(generator):
    observation = first_round(generator, lengths=(12,))
    keys = observation.keys.clone()
    keys[:, :, 7:, 3] = 1.5
    score = LagKV(5)(replace(observation, keys=keys)).score
    assert sorted(score[0, 1, 2:7].tolist()) == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    keys[:, :, 2:7, 3] = 1e4
    assert torch.equal(LagKV(5)(replace(observation, keys=keys)).score, score)


def test_gaussian_matrices_are_standard_normal_and_differ_by_layer_and_seed():
    """100,000 numbers: mean, variance and fourth moment within 5 standard errors (false alarm: 1 in 100,000)."""
    made = {(seed, layer): gaussian(seed, layer, 1000, 100) for seed, layer in ((0, 0), (1, 0), (0, 1))}
    for x in made.values():
        assert abs(float(x.mean())) < 5 / 1e5**0.5
        assert abs(float(x.square().mean()) - 1) < 5 * (2 / 1e5) ** 0.5
        assert abs(float(x.pow(4).mean()) - 3) < 5 * (96 / 1e5) ** 0.5
    first, *others = made.values()
    for other in others:
        assert abs(float((first * other).mean())) < 5 / 1e5**0.5


@pytest.mark.parametrize("propose", [Leverage(sketch=5), CurDKV(), Compactor(sketch=5)], ids=repr)
def test_sketches_differ_by_layer_and_seed(propose, generator):
    """Errors of the sketch are not the same in every layer."""
    observation = first_round(generator)
    score = propose(observation).score
    for other in (propose(replace(observation, layer=1)), replace(propose, seed=1)(observation)):
        assert (score - other.score).abs().max() > 1e-3 * score.max()


def test_keys_so_large_that_the_ridge_is_lost_have_finite_leverage(generator):
    """Fewer keys than dimensions: without a floor of the ridge the Gram matrix has no inverse."""
    observation = first_round(generator, lengths=(9,))
    observation = replace(observation, keys=observation.keys * 1e12)
    score = Leverage()(observation).score
    assert torch.isfinite(score).all()
    assert score.sum(-1).allclose(torch.tensor(8.0), rtol=1e-3)  # the rank of what is centred


ASKING = [ExpectedAttention(), NonCausal(), Compactor(), Lava(), CapKVGreedy()]


@pytest.mark.parametrize("propose", ASKING, ids=repr)
def test_without_queries_there_is_a_clear_error(propose, generator):
    silent = part(first_round(generator), 0, queries=torch.empty(1, 3, 5, 0, 14), query_lengths=torch.tensor([0]))
    with pytest.raises(ValueError, match="looks at queries"):
        propose(silent)


@pytest.mark.parametrize("propose", [ExpectedAttention(), Leverage(), Compactor(), CapKVGreedy()], ids=repr)
def test_without_a_rotation_there_is_a_clear_error(propose, generator):
    assert propose.needs_rotation
    with pytest.raises(ValueError, match="undoes the rotary embedding"):
        propose(first_round(generator, rotation=None))


WRONG = [
    (LagKV, {"lag": 0}, "lag must be a whole number of at least 1, not 0"),
    (ExpectedAttention, {"ahead": 0}, "ahead must be a whole number of at least 1, not 0"),
    (ExpectedAttention, {"eps": -0.1}, "expected_attention needs eps >= 0, not -0.1"),
    (Leverage, {"sketch": 0}, "sketch must be a whole number of at least 1, not 0"),
    (Leverage, {"ridge": 0.0}, "leverage needs ridge > 0, .* not 0.0"),
    (Leverage, {"seed": -1}, "seed must be a whole number of at least 0, not -1"),
    (NonCausal, {"chunk": 0}, "chunk must be a whole number of at least 1, not 0"),
    (Compactor, {"blend": -1.0}, "compactor needs blend >= 0, not -1.0"),
    (Compactor, {"chunk": 0}, "chunk must be a whole number of at least 1, not 0"),
    (Compactor, {"ridge": -1.0}, "leverage needs ridge > 0, .* not -1.0"),
    (CurDKV, {"rank": 0}, "rank must be a whole number of at least 1, not 0"),
    (CurDKV, {"seed": -2}, "seed must be a whole number of at least 0, not -2"),
    (Lava, {"window": 0}, "lava needs window >= 1 and an odd pool >= 1, not window=0, pool=7"),
    (Lava, {"pool": 4}, "lava needs window >= 1 and an odd pool >= 1, not window=32, pool=4"),
    (CapKVGreedy, {"ahead": 0}, "ahead must be a whole number of at least 1, not 0"),
]


@pytest.mark.parametrize(("kind", "knobs", "said"), WRONG, ids=lambda x: str(x))
def test_a_knob_out_of_range_is_refused_by_name(kind, knobs, said):
    with pytest.raises(ValueError, match=said):
        kind(**knobs)
