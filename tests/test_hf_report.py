"""The report says what the cache holds, entry by entry."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import kvest
from hf_tools import POLICIES, feed, hybrid, same_entries, tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_positions_and_weights_agree(tiny_model, generator, policy):
    """Fault 14: which positions were kept can be asked for."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, policy, seed=5)
    feed(model, cache, tokens(generator, 131, rows=2))
    feed(model, cache, tokens(generator, 3, rows=2))
    report = cache.report()
    assert kvest.Policy.parse(report.policy) == cache.policy == kvest.Policy.parse(policy)
    assert report.seed == 5
    assert report.seen.tolist() == [134, 134]
    assert report.kept.shape == (3, 2, 2)
    assert report.evicted_layers == [0, 1, 2]
    assert not report.kept_whole
    for layer in range(3):
        for row in range(2):
            for head in range(2):
                where, weights = report.positions[layer][row][head], report.log_weights[layer][row][head]
                assert where.shape == weights.shape == (report.kept[layer, row, head],)
                assert where.dtype == torch.int64
                assert (where.diff() > 0).all()
                assert where[-19:].tolist() == list(range(134 - 19, 134)), "window and what came since"
                assert weights[-19:].abs().max() == 0


def test_the_keys_held_are_those_of_the_positions_reported(tiny_model, generator):
    """Each kept key and value is the one that a stock cache holds at that position."""
    model, prompt = tiny_model(), tokens(generator, 131, rows=2)
    stock = DynamicCache(config=model.config)
    feed(model, stock, prompt)
    for policy in POLICIES:
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, prompt)
        report = cache.report()
        for layer, whole in enumerate(stock.layers):
            store = cache.layers[layer].store
            for row in range(2):
                for head in range(2):
                    where = report.positions[layer][row][head]
                    assert torch.equal(store.head(store.keys, row, head), whole.keys[row, head, where])
                    assert torch.equal(store.head(store.values, row, head), whole.values[row, head, where])


def test_a_report_is_a_copy(tiny_model, generator):
    """What comes later does not change what was said."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@61, every=2")
    feed(model, cache, tokens(generator, 131))
    report = cache.report()
    before = copy.deepcopy(report)
    for _ in range(5):
        feed(model, cache, tokens(generator, 1))
    same_entries(report, 0, before, 0, 0)
    assert report.kept.double().mean() == 61
    assert report.seen.tolist() == [131]
    assert report.evictions == [1]


def test_before_any_prompt_the_report_is_empty(tiny_model):
    report = kvest.EvictionCache(tiny_model(), "h2o/top_k/none@0.5").report()
    assert report.seen.tolist() == []
    assert report.kept_bytes == report.full_bytes == 0
    assert report.kept_whole
    assert "nothing yet" in str(report)


def test_a_prompt_shorter_than_the_budget_is_kept_whole_and_the_report_says_so(tiny_model, generator):
    model = tiny_model()
    for policy in ("h2o/top_k/none@131", "uniform/systematic/inclusion@131", "h2o/poisson/inclusion@1GiB"):
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, tokens(generator, 131))
        report = cache.report()
        assert report.kept_whole
        assert report.evictions == [0]
        assert report.kept.unique().tolist() == [131]
        assert torch.equal(report.positions[0][0][0], torch.arange(131))
        assert report.kept_bytes == report.full_bytes == 64 * 131 * 6
        assert "kept whole" in str(report)


def test_one_token_more_than_the_budget_is_evicted(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, "h2o/top_k/none@130")
    feed(model, cache, tokens(generator, 131))
    assert cache.report().kept.unique().tolist() == [130]
    assert not cache.report().kept_whole
    assert "kept whole" not in str(cache.report())


def test_the_printed_report_states_tokens_entries_and_bytes(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@0.25")
    feed(model, cache, tokens(generator, 200))
    assert [line.split() for line in str(cache.report()).split("\n")] == [
        ["policy", "h2o/systematic/inclusion@0.25"],
        ["tokens", "seen", "200"],
        ["entries", "kept", "50", "per", "head,", "25.0%", "of", "the", "tokens"],
        f"bytes held {72 * 300 / 1024:.1f} KiB of {64 * 1200 / 1024:.1f} KiB (28.1%)".split(),
        ["evictions", "1"],
    ]


def test_a_hybrid_report_covers_every_layer(generator):
    """Two sliding layers, one full: the sliding ones report their window, exact."""
    model = hybrid()
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@0.25")
    feed(model, cache, tokens(generator, 131))
    report = cache.report()
    assert report.evicted_layers == [2, 5]
    assert report.kept[:, 0, 0].tolist() == [15, 15, 32, 15, 15, 32]
    for layer in (0, 1, 3, 4):
        for head in range(2):
            assert torch.equal(report.positions[layer][0][head], torch.arange(131 - 15, 131))
            assert report.log_weights[layer][0][head].abs().max() == 0
    assert report.full_bytes == 64 * 2 * (2 * 131 + 4 * 15)


def test_a_report_is_a_copy_that_later_tokens_do_not_change(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, "uniform/poisson/inclusion@0.4")
    feed(model, cache, tokens(generator, 61))
    report = cache.report()
    before = [weights.clone() for layer in report.log_weights for row in layer for weights in row]
    storages = {layer.store.log_weights.untyped_storage().data_ptr() for layer in cache.layers}
    for layer in cache.layers:
        layer.store.log_weights.zero_()
    after = [weights for layer in report.log_weights for row in layer for weights in row]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not storages & {weights.untyped_storage().data_ptr() for weights in after}
