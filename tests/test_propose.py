"""Every proposal against its twin: a loop over entries, in float64 (`reference.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from build import first_round, part, second_round
from kvest.observe import BLOCK_ELEMENTS, attended, blocks, query_weights
from kvest.propose import (
    H2O,
    CapKV,
    Harmonic,
    KeyDiff,
    KeyNorm,
    LastQuery,
    Mixed,
    OutputError,
    SnapKV,
    Streaming,
    Uniform,
    WithCertain,
)
from kvest.rotary import Rotation

CASES = [
    (Uniform(), reference.uniform, {}),
    (Streaming(), reference.streaming, {}),
    (KeyNorm(), reference.key_norm, {}),
    (KeyDiff(), reference.keydiff, {}),
    (LastQuery(), reference.last_query, {}),
    (LastQuery(values=False, layer=True), reference.last_query, {"values": False, "layer": True}),
    (SnapKV(), reference.snapkv, {}),
    (SnapKV(window=5, pool=3), reference.snapkv, {"window": 5, "pool": 3}),
    (SnapKV(window=9, pool=1), reference.snapkv, {"window": 9, "pool": 1}),
    (SnapKV(window=5, pool=5, peer=True), reference.snapkv, {"window": 5, "pool": 5, "peer": True}),
    (H2O(), reference.h2o, {}),
    (H2O(values=True), reference.h2o, {"values": True}),
    (H2O(divide=False), reference.h2o, {"divide": False}),
    (Harmonic(), reference.harmonic, {}),
    (Harmonic(values=False), reference.harmonic, {"values": False}),
    (Harmonic(rows=4), reference.harmonic, {"rows": 4}),
    (OutputError(), reference.output_error, {}),
    (OutputError(rows=5), reference.output_error, {"rows": 5}),
    (CapKV(ahead=17), reference.capkv, {"ahead": 17}),
    (CapKV(tau=2.0, ahead=3), reference.capkv, {"tau": 2.0, "ahead": 3}),
    (CapKV(form="paper", tau=0.1), reference.capkv, {"form": "paper", "tau": 0.1}),
    (Mixed(KeyNorm(), 0.3), reference.mixed, {"of": reference.key_norm, "eps": 0.3}),
    (Mixed(H2O(values=True), 0.2), reference.mixed, {"of": lambda a: reference.h2o(a, values=True), "eps": 0.2}),
]


@pytest.mark.parametrize("make", [first_round, second_round])
@pytest.mark.parametrize(("propose", "twin", "knobs"), CASES, ids=[repr(case[0]) for case in CASES])
def test_score_equals_its_twin(propose, twin, knobs, make, generator):
    """Fault 12: in the first round with padding, in a second with gaps, weights and heads of different lengths."""
    observation = make(generator)
    got = propose(observation)
    want = reference.score(twin, observation, **knobs)
    assert not got.certain.any()
    torch.testing.assert_close(got.score.double(), want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("make", [first_round, second_round])
@pytest.mark.parametrize(("propose", "twin", "knobs"), CASES[3:5] + CASES[9:17], ids=repr)
def test_attention_scores_equal_their_twins_where_one_logit_towers_over_all_others(
    propose, twin, knobs, make, generator
):
    """Hundreds of nats above the query's own entry and the first one, from which the exponentials are counted."""
    observation = make(generator)
    queries, keys = observation.queries.clone(), observation.keys.clone()
    queries[..., 0], keys[..., 0] = 30.0, 0.0
    keys[:, :, -9, 0], keys[:, :, -8, 0] = 100.0, 99.99
    towering = replace(observation, queries=queries, keys=keys)
    got = propose(towering)
    want = reference.score(twin, towering, **knobs)
    torch.testing.assert_close(got.score.double(), want, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("make", [first_round, second_round])
@pytest.mark.parametrize("share", [0.0, 0.29, 0.4, 1.0])
def test_with_certain_takes_what_the_other_criterion_ranks_first(share, make, generator):
    """The score is the sampled proposal's; the certain ones are floor(share * budget), as far as there is room."""
    observation = make(generator)
    got = WithCertain(H2O(values=True), KeyDiff(), share)(observation)
    want = reference.score(reference.with_certain, observation, by=reference.keydiff, share=share)
    assert torch.equal(got.certain, want.bool())
    assert torch.equal(got.score, H2O(values=True)(observation).score)


def test_with_certain_counts_exactly(generator):
    """floor(0.13 * 900) is 117, not the 116 of float32, and no more than the room that sinks and window leave."""
    for budget, share, count in [(100, 0.29, 29), (100, 0.299, 29), (100, 1.0, 95), (900, 0.13, 117)]:
        observation = first_round(generator, lengths=(budget + 27,), budget=torch.tensor([budget]))
        certain = WithCertain(Uniform(), KeyDiff(), share)(observation).certain
        assert certain.sum(-1).tolist() == [[count] * 3]
        assert not (certain & observation.protected).any()


def test_nested_certain_shares_add_up_to_no_more_than_the_budget(generator):
    """The outer criterion takes other entries than the inner one took, as far as there is room."""
    observation = first_round(generator, lengths=(127,), budget=torch.tensor([100]))
    inner = WithCertain(H2O(), KeyDiff(), 0.4)
    for outer, count in [(0.3, 70), (0.9, 95)]:
        certain = WithCertain(Mixed(inner), KeyNorm(), outer)(observation).certain
        assert certain.sum(-1).tolist() == [[count] * 3]
        assert not (inner(observation).certain & ~certain).any()
        assert not (certain & observation.protected).any()


def test_the_authors_capkv_rotates_by_what_follows(generator):
    """Another rotation, another score: with none the mean query is the plain mean."""
    observation = first_round(generator)
    still = Rotation(lambda: (torch.empty(0), 1.0))
    turned, plain = (CapKV()(replace(observation, rotation=r)).score for r in (observation.rotation, still))
    assert (turned - plain).abs().max() > 0.01
    with pytest.raises(ValueError, match=r"undoes the rotary embedding"):
        CapKV()(replace(observation, rotation=None))


def test_capkv_of_huge_weights_is_the_leverage_without_ridge(generator):
    """exp(tau <k, mu>) overflows float64 here; the score is that of A without the identity."""
    observation = first_round(generator, lengths=(23,))
    observation = replace(observation, keys=observation.keys * 40, queries=observation.queries * 40)
    score = CapKV(form="paper")(observation).score
    assert torch.isfinite(score).all()
    assert (score <= 1 + 1e-5).all()  # a leverage
    log_weights = observation.queries.mean(3) @ observation.keys.mT
    heaviest = torch.nn.functional.one_hot(log_weights.argmax(-1), 23).double().mean(2)
    assert (score > 0.99 * heaviest - 1e-9).all()  # the entry of the largest weight has its direction to itself


def test_h2o_adds_up_over_rounds(generator):
    """Two rounds over halves of the queries collect what one round over all of them does."""
    whole = first_round(generator, lengths=(23,))
    early = replace(
        whole,
        **{
            name: getattr(whole, name)[:, :, :13] for name in ("keys", "values", "log_weights", "positions", "prepared")
        },
        queries=whole.queries[:, :, :, :13],
        lengths=whole.lengths * 0 + 13,
        query_lengths=torch.tensor([13]),
        seen=torch.tensor([13]),
    )
    carried = torch.nn.functional.pad(H2O()(early).history, (0, 10))
    late = replace(whole, queries=whole.queries[:, :, :, 13:], query_lengths=torch.tensor([10]), history=carried)
    once, twice = H2O()(whole), H2O()(late)
    torch.testing.assert_close(twice.history, once.history)
    torch.testing.assert_close(twice.score, once.score)
    assert once.history.sum(-1).allclose(torch.tensor(23.0))  # every query gives 1 away


@pytest.mark.parametrize("norm", [1.0, 1e4, 3e4, 1e5])
def test_probabilities_sum_to_1_where_a_rounded_logit_is_off_by_many_nats(norm, generator):
    """All keys nearly equal and as long as the queries: 1e5 squared is a logit of 1e9, exact to 64."""
    observation = first_round(generator, lengths=(300, 211))
    direction = torch.randn(128, generator=generator)
    direction *= norm / direction.norm()
    keys = direction + 1e-3 * torch.randn(*observation.keys.shape[:3], 128, generator=generator)
    queries = direction + 1e-3 * torch.randn(*observation.queries.shape[:4], 128, generator=generator)
    for block in blocks(replace(observation, keys=keys, queries=queries, scale=1.0), elements=1):  # query by query
        sums = block.probabilities.sum(dim=-1)
        real = observation.query_valid[:, block.slots][:, None, None].expand_as(sums)
        torch.testing.assert_close(sums[real], torch.ones_like(sums[real]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("slots", [None, torch.tensor([3, 700, 1100])])
def test_logits_are_held_for_a_block_of_queries_only(slots, generator):
    """Fault 17: never a `t x t` matrix, and keys are not repeated for the query heads of a group."""
    observation = first_round(generator, lengths=(1200,))
    b, h, g, q, _ = observation.queries.shape
    t = observation.keys.shape[2]
    sizes = [block.mass.numel() for block in blocks(observation, slots)]
    assert max(sizes) <= BLOCK_ELEMENTS < b * h * g * q * t / 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slots", [None, [1, 4, 5, 10]])
def test_blocks_of_any_size_give_the_same_attention(slots, causal, generator):
    """Block by block equals at once: the size of a block is no part of the result."""
    observation = second_round(generator)
    chosen = None if slots is None else torch.tensor(slots)
    (whole,) = blocks(observation, chosen, causal=causal)
    t = observation.keys.shape[2]
    for elements in (1, 2 * 3 * 5 * t * 3, 2 * 3 * 5 * t * 4 + 1):
        start = 0
        for block in blocks(observation, chosen, causal=causal, elements=elements):
            r, visible = block.probabilities.shape[-2:]
            wanted = whole.probabilities[..., start : start + r, :]
            assert torch.equal(block.slots, whole.slots[start : start + r])
            torch.testing.assert_close(block.probabilities, wanted[..., :visible])
            exists = observation.query_valid[:, block.slots][:, None, None, :, None]
            assert not (wanted * exists)[..., visible:].any()
            start += r
        assert start == len(whole.slots)


def test_attended_sums_to_the_weights(generator):
    """Each query spreads its weight over the entries that exist, and missing queries have none."""
    observation = second_round(generator)
    total = attended(observation, query_weights(observation))
    assert not (total * ~observation.valid).any()
    want = observation.query_lengths.float()[:, None].expand(2, 3)
    torch.testing.assert_close(total.sum(-1), want)


def test_recent_takes_the_latest_queries_of_each_row(generator):
    observation = second_round(generator)
    recent = observation.recent(8)
    assert torch.equal(recent.queries, observation.queries[:, :, :, -8:])
    assert recent.query_lengths.tolist() == [8, 7]
    assert observation.recent(None) is observation
    assert observation.recent(11) is observation


@pytest.mark.parametrize("propose", [LastQuery(), SnapKV(), H2O(), Harmonic(), OutputError(), CapKV()], ids=repr)
def test_without_queries_there_is_a_clear_error(propose, generator):
    silent = part(first_round(generator), 0, queries=torch.empty(1, 3, 5, 0, 14), query_lengths=torch.tensor([0]))
    with pytest.raises(ValueError, match="looks at queries"):
        propose(silent)


@pytest.mark.parametrize("propose", [H2O(), Harmonic(), Harmonic(rows=4), SnapKV(window=5)], ids=repr)
@pytest.mark.parametrize("make", [first_round, second_round])
def test_known_normalizers_change_nothing(propose, make, generator):
    """They stand in for sums that would be taken; those of missing queries are garbage."""
    observation = make(generator)
    q, t = observation.queries.shape[3], observation.keys.shape[2]
    logits = torch.einsum("bhgqd,bhtd->bhgqt", observation.queries, observation.keys).double() * observation.scale
    logits = logits + observation.log_weights[:, :, None, None]
    later = torch.arange(t) > torch.arange(t - q, t)[:, None]
    unseen = later | ~observation.valid[:, :, None, None]
    normalizers = logits.masked_fill(unseen, -torch.inf).logsumexp(-1).float()
    normalizers = normalizers.masked_fill(~observation.query_valid[:, None, None], torch.nan)
    got = propose(replace(observation, normalizers=normalizers))
    torch.testing.assert_close(got.score, propose(observation).score, rtol=1e-4, atol=1e-6)
    wrong = propose(replace(observation, normalizers=normalizers + 0.1)).score
    assert (wrong - got.score).abs().max() > 1e-3  # they were used


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_key_norm_ranks_keys_however_far_apart_their_norms_are(size, generator):
    """Hundreds apart: exponentials of the norms themselves would be 0 for most."""
    observation = first_round(generator, lengths=(23,))
    observation = replace(observation, keys=observation.keys * size)
    score = KeyNorm()(observation).score
    want = reference.score(reference.key_norm, observation)
    torch.testing.assert_close(score.double(), want, rtol=1e-4, atol=0)
    order = observation.keys.norm(dim=-1).argsort(dim=-1)
    assert torch.equal(score.argsort(dim=-1, descending=True), order)
    assert (score / score.amax(dim=-1, keepdim=True)).min() > 1e-30
