"""Wrappers against their twins: proposals made of other proposals (`reference_designs.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvest
import reference
import reference_designs as twins
from build import first_round, second_round
from kvest import observe
from kvest.policy import Policy
from kvest.propose import (
    H2O,
    PROPOSALS,
    CapKV,
    Chunked,
    Critical,
    Defensive,
    Harmonic,
    KeyDiff,
    KeyNorm,
    LastQuery,
    Mixed,
    Sharp,
    SnapKV,
    Streaming,
    Uniform,
    WithCertain,
)
from kvest.propose._wrapper import Wrapper
from kvest.random import Stream
from kvest.sample import TopK
from kvest.types import Split

every_round = pytest.mark.parametrize("make", [first_round, second_round])


def by_values(a: reference.Head) -> reference.Scores:
    return reference.h2o(a, values=True)


CASES = [
    (Sharp(H2O(values=True)), twins.sharp, {"of": by_values, "c": 1.3}),
    (Sharp(KeyNorm(), 0.4), twins.sharp, {"of": reference.key_norm, "c": 0.4}),
    (Chunked(H2O(values=True), 5), twins.chunked, {"of": by_values, "size": 5, "layer": True}),
    (Chunked(KeyNorm(), 3, layer=False), twins.chunked, {"of": reference.key_norm, "size": 3, "layer": False}),
    (Chunked(SnapKV()), twins.chunked, {"of": reference.snapkv, "size": 20, "layer": True}),
    (Defensive(LastQuery()), twins.defensive, {"of": reference.last_query}),
    (Defensive(SnapKV(7, 3)), twins.defensive, {"of": lambda a: reference.snapkv(a, 7, 3)}),
    (Defensive(Harmonic(rows=4, values=False)), twins.defensive, {"of": lambda a: reference.harmonic(a, 4, False)}),
    (Defensive(H2O()), twins.defensive, {"of": twins.largest_so_far}),
    (Critical(KeyNorm(), 0.03), twins.critical, {"of": reference.key_norm, "eps": 0.03}),
    (Critical(H2O(values=True)), twins.critical, {"of": by_values, "eps": 1e-4}),
    (
        Mixed(Defensive(SnapKV()), 0.3),
        reference.mixed,
        {"of": lambda a: reference.snapkv(twins.WorstCase(a)), "eps": 0.3},
    ),
]


@every_round
@pytest.mark.parametrize(("propose", "twin", "knobs"), CASES, ids=[repr(case[0]) for case in CASES])
def test_score_equals_its_twin(propose, twin, knobs, make, generator):
    observation = make(generator)
    want = reference.score(twin, observation, **knobs)
    torch.testing.assert_close(propose(observation).score.double(), want, rtol=2e-4, atol=1e-7)


@every_round
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_sharp_neither_overflows_nor_vanishes(size, make, generator):
    """The cube of 1e15 is no float32: the result scales with the score."""
    observation = make(generator)
    plain = H2O(values=True)(observation).score
    scaled = replace(observation, values=observation.values * size)
    got = Sharp(H2O(values=True), 3.0)(scaled).score / size
    torch.testing.assert_close(got, Sharp(H2O(values=True), 3.0)(observation).score, rtol=1e-4, atol=0)
    assert torch.equal(got.argmax(-1), plain.argmax(-1))


@every_round
def test_top_k_keeps_chunks_whole_up_to_one(make, generator):
    """Of the entries that compete, at most one chunk of a head is kept in part, and of that the most recent."""
    observation = make(generator, sinks=0, window=1)
    proposal = replace(Chunked(H2O(values=True), 4, layer=False)(observation), certain=observation.protected)
    count = observation.budget[:, None].expand(2, 3)
    stream = Stream(0, 0, [0, 0])
    keep = TopK()(proposal, observation.valid, count, observation.positions, stream).keep
    parts = 0
    for row, head in [(r, h) for r in range(2) for h in range(3)]:
        rivals = (observation.valid & ~observation.protected)[row, head]
        chunk = observation.positions[row, head] // 4
        halved = []
        for c in chunk[rivals].unique():
            kept = keep[row, head][rivals & (chunk == c)]
            assert torch.equal(kept, kept.sort().values)  # the most recent part
            halved += [c] if kept.any() and not kept.all() else []
        assert len(halved) <= 1
        parts += len(halved)
    assert parts > 0


def test_chunks_average_over_the_heads_of_all_processes(generator):
    """Two processes with a head each give what one with both does."""
    whole = first_round(generator, lengths=(23,))
    want = Chunked(H2O(), 5)(whole).score
    tables = []
    for head in range(3):
        Chunked(H2O(), 5)(replace(whole.head(0, head), split=Split(head, lambda x: [tables.append(x) or x] * 3)))
    for head in range(3):
        part = replace(whole.head(0, head), split=Split(head, lambda x: tables))
        torch.testing.assert_close(Chunked(H2O(), 5)(part).score, want[:, head : head + 1])


def test_largest_attention_is_carried_over_rounds(generator):
    """Two rounds over halves of the queries find the maximum that one round over all of them does."""
    whole = first_round(generator, lengths=(23,))
    cut = {name: getattr(whole, name)[:, :, :13] for name in ("keys", "values", "log_weights", "positions", "prepared")}
    count = torch.tensor([13])
    early = replace(
        whole,
        **cut,
        queries=whole.queries[:, :, :, :13],
        lengths=whole.lengths * 0 + 13,
        query_lengths=count,
        seen=count,
    )
    propose = Defensive(H2O())
    carried = torch.nn.functional.pad(propose(early).history, (0, 10))
    late = replace(whole, queries=whole.queries[:, :, :, 13:], query_lengths=torch.tensor([10]), history=carried)
    torch.testing.assert_close(propose(late).history, propose(whole).history)
    torch.testing.assert_close(propose(late).score, propose(whole).score)
    assert propose(whole).history.amax() <= 1


def test_queries_that_do_not_exist_are_not_the_worst_case(generator):
    """Whatever stands in their slots."""
    observation = second_round(generator)
    silent = ~observation.query_valid[:, None, None, :, None]
    found = []
    for garbage in (torch.zeros(14), 9 * torch.randn(14, generator=generator), -1e4 * torch.ones(14)):
        queries = torch.where(silent, garbage, observation.queries)
        found.append(Defensive(H2O())(replace(observation, queries=queries)).score)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_defensive_wants_attention():
    for inner in (KeyDiff(), CapKV(), Uniform(), Mixed(KeyNorm())):
        with pytest.raises(ValueError, match=rf"{type(inner).__name__} does not add attention up.*defensive\(snapkv\)"):
            Defensive(inner)
    assert Defensive(WithCertain(KeyNorm(), SnapKV())).attends


@every_round
@pytest.mark.parametrize("first", [0.0, 0.29, 0.5, 1.0])
def test_the_first_stage_of_critical_is_certain(first, make, generator):
    """floor(first * budget) entries by the plain score, as far as sinks and window leave room."""
    observation = make(generator)
    got = Critical(H2O(values=True), first=first)(observation).certain
    want = reference.score(twins.critical_certain, observation, of=by_values, first=first)
    assert torch.equal(got, want.bool())


@pytest.mark.parametrize("elements", [1, 29 * 3, 29 * 7 + 1])
def test_projected_values_are_held_for_a_block_of_entries(elements, generator, monkeypatch):
    """No tensor of all entries, query heads and the model's width; blocks of any size give the same score."""
    observation = second_round(generator)
    whole = Critical(Uniform())(observation).score
    monkeypatch.setattr("kvest.propose.critical.BLOCK_ELEMENTS", elements)
    largest = 0
    plain = torch.linalg.vector_norm

    def watched(x, *args, **knobs):
        nonlocal largest
        largest = max(largest, x.numel())
        return plain(x, *args, **knobs)

    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    torch.testing.assert_close(Critical(Uniform())(observation).score, whole)
    assert largest <= max(elements, 29)
    assert observe.BLOCK_ELEMENTS >= 1 << 19


def test_critical_says_what_it_was_not_given(generator):
    with pytest.raises(ValueError, match=r"pass Observation\.output"):
        Critical(Uniform())(replace(first_round(generator), output=None))


@pytest.mark.parametrize("proposal", ["snapkv", "key_norm"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_the_projection_of_an_observation_is_the_models_own(heads, kv_heads, proposal, tiny_model, monkeypatch):
    """Attention that sees one value in one query head only comes out of o_proj as W_O v of that head; a proposal that
    looks at no query has as many of them."""
    model = tiny_model(heads=heads, kv_heads=kv_heads)
    seen = []
    plain = Policy.proposal
    monkeypatch.setattr(Policy, "proposal", lambda self, o: seen.append(o) or plain(self, o))
    cache = kvest.EvictionCache(model, f"critical({proposal})/top_k/none@24")
    with torch.no_grad():
        model(torch.arange(1, 42)[None], past_key_values=cache)
    assert len(seen) == 3
    for layer, o in zip(model.model.layers, seen, strict=True):
        for head in range(heads):
            h, g = divmod(head, heads // kv_heads)
            value = o.values[0, h, 17]
            alone = torch.zeros(heads, 8)
            alone[head] = value
            want = layer.self_attn.o_proj(alone.flatten()) - layer.self_attn.o_proj(torch.zeros(8 * heads))
            torch.testing.assert_close(o.output[h, g] @ value, want)


def test_a_wrapper_passes_on_what_the_inner_proposal_needs():
    """All that a policy asks a proposal for; `mixed` alone makes a deterministic score one that can be drawn from."""
    sure = WithCertain(KeyNorm(), CapKV())
    for name, kind in PROPOSALS.items():
        if not issubclass(kind, Wrapper) or name in ("with_certain", "defensive"):
            continue
        assert kind(H2O()).carries
        assert kind(H2O()).attends
        assert kind(H2O()).queries is None
        assert kind(SnapKV(7)).queries == 7
        assert not kind(SnapKV(7)).carries
        assert kind(CapKV()).needs_rotation
        assert kind(sure).needs_rotation
        assert not kind(CapKV("paper")).needs_rotation
        assert kind(Critical(KeyNorm())).needs_output
        assert kind(KeyNorm()).needs_output == (kind is Critical)
        assert kind(Streaming()).deterministic_only == (kind is not Mixed)
    assert Defensive(H2O()).carries
    assert Defensive(SnapKV(9)).queries == 9
    assert WithCertain(KeyNorm(), Critical(KeyNorm())).needs_output
    assert WithCertain(Critical(KeyNorm()), KeyNorm()).needs_output
    assert WithCertain(KeyNorm(), SnapKV(9)).queries == 9
    assert not WithCertain(KeyNorm(), H2O()).carries


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sharp(Uniform(), 0.0), "sharp needs c > 0, not 0.0"),
        (lambda: Chunked(Uniform(), 0), "size must be a whole number of at least 1, not 0"),
        (lambda: Critical(Uniform(), -1.0), "critical needs eps >= 0, not -1.0"),
        (lambda: Critical(Uniform(), first=1.5), "critical needs 0 <= first <= 1, not 1.5"),
    ],
)
def test_knobs_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
