"""Caches that hold made entries: every way in which a cache is read, turned, cut, saved and counted."""

from __future__ import annotations

import copy

import pytest
import torch

import kvest
from hf_tools import feed, same_entries, singly, tokens
from kvest.grammar import say

ONE_SHOT = (
    "h2o(values=True)/top_k/none+centroids(8)@0.25",
    "uniform/systematic/inclusion+centroids(3, share=0.5)@0.3",
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)+centroids(5, share=0.5)@0.3",
    "with_certain(snapkv(11), by=keydiff, share=0.4)/poisson/inclusion+centroids(4, share=0.25)@0.4",
    "h2o(values=True)+one_threshold/top_k/none+moments@0.25",
)
STANDING = (
    "last_query(layer=True)/top_k/none+centroids(8)@61, every=7",
    "h2o(values=True)+one_threshold/systematic/inclusion+centroids(5, share=0.5)@61, every=7",
    "snapkv(11)/systematic/tempered(0.85)+centroids(3, share=0.5, rows=9)@61, every=7, sinks=0",
    "h2o/top_k/none+moments(at=mean)@61, every=7",
)
MERGED = (
    "h2o(values=True)/top_k/none+merge@0.25",
    "snapkv(11)/systematic/inclusion+merge(0.1, keys=False)@61, every=7",
)
RECALLED = (
    "h2o+one_threshold/top_k/none+recall(0.5, 0.3)@0.25",
    "snapkv(11)/systematic/none+recall(0.5, 0.3, where=disk)@61, every=7",
)


def made(report: kvest.Report) -> torch.Tensor:
    """How many made entries each head holds, [l, b, h]."""
    return torch.tensor([[[int((x < 0).sum()) for x in row] for row in layer] for layer in report.positions])


@pytest.mark.parametrize("policy", [*ONE_SHOT, *STANDING])
def test_made_entries_stand_first_and_count_towards_the_budget(tiny_model, generator, policy):
    """Ascending positions; as many entries and bytes as the same policy without centroids."""
    model, prompt = tiny_model(layers=2), tokens(generator, 211)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, prompt)
    report = cache.report()
    assert kvest.Policy.parse(report.policy) == cache.policy
    assert (made(report) == cache.policy.stand_in.most).all()
    for layer in report.positions:
        for where in layer[0]:
            assert (where.diff() >= 0).all()
            assert (where[where >= 0].diff() > 0).all()
    if "poisson" not in policy:
        plain = kvest.EvictionCache(model, kvest.Policy.parse(policy.replace(f"+{say(cache.policy.stand_in)}", "")))
        feed(model, plain, prompt)
        same = plain.report()
        assert torch.equal(report.kept, same.kept)
        assert torch.equal(report.made, made(report))
        assert not same.made.any()
        assert "made" in str(report)
        assert "made" not in str(same)
        if "every" not in policy:  # a standing one remembers queries as well
            slopes = 2 * 2 * 8 * 8 * 4 if "moments" in policy else 0  # layers, heads, widths, float32
            assert report.kept_bytes == same.kept_bytes + slopes


@pytest.mark.parametrize("policy", STANDING)
def test_the_budget_holds_over_rounds_and_what_was_made_is_made_anew(tiny_model, generator, policy):
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, tokens(generator, 131))
    for step in range(1, 23):
        feed(model, cache, tokens(generator, 1))
        report = cache.report()
        assert report.kept.double().mean() == 61 + step % 7
        assert (made(report) == cache.policy.stand_in.most).all()
        assert all(torch.isfinite(x).all() for layer in report.log_weights for row in layer for x in row)
    assert report.evictions == [4]


@pytest.mark.parametrize("policy", [*ONE_SHOT, *STANDING, *MERGED, *RECALLED])
def test_a_question_fed_at_once_equals_token_by_token(tiny_model, generator, policy):
    model = tiny_model(layers=2)
    policy = policy.replace("every=7", "every=40")
    at_once = kvest.EvictionCache(model, policy)
    feed(model, at_once, tokens(generator, 131))
    feed(model, at_once, tokens(generator, 53))
    one_by_one, question = copy.deepcopy(at_once), tokens(generator, 29)
    torch.testing.assert_close(
        feed(model, at_once, question), singly(model, one_by_one, question), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("policy", [*ONE_SHOT, *STANDING, *MERGED, *RECALLED])
def test_a_row_of_a_padded_batch_is_the_row_alone(tiny_model, generator, policy):
    """Over several turns; one row is short enough to be evicted long after the other."""
    model = tiny_model(layers=2)
    lengths = (151, 97, 70)
    rows = [tokens(generator, n) for n in lengths]
    ids = torch.cat(
        [
            torch.cat([torch.zeros(1, 151 - n, dtype=torch.long), row], dim=1)
            for n, row in zip(lengths, rows, strict=True)
        ]
    )
    mask = (torch.arange(151) >= 151 - torch.tensor(lengths)[:, None]).long()
    batch = kvest.EvictionCache(model, policy)
    alone = [kvest.EvictionCache(model, policy) for _ in rows]
    feed(model, batch, ids, mask)
    for cache, row in zip(alone, rows, strict=True):
        feed(model, cache, row)
    for count in (1, 1, 1, 17, *[1] * 9):
        piece = tokens(generator, count, rows=3)
        mask = torch.cat([mask, torch.ones_like(piece)], dim=1)
        logits = feed(model, batch, piece, mask)
        for i, cache in enumerate(alone):
            torch.testing.assert_close(logits[i], feed(model, cache, piece[i : i + 1])[0], rtol=1e-4, atol=1e-4)
    for i, cache in enumerate(alone):
        same_entries(batch.report(), i, cache.report(), 0, 1e-4)


@pytest.mark.parametrize("policy", [ONE_SHOT[2], *STANDING, *MERGED, *RECALLED])
def test_a_reload_and_a_branch_change_nothing(tiny_model, generator, tmp_path, policy):
    """Fault 15: the logits of a reloaded cache are the same bit for bit; those after a branch up to rounding."""
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, policy, seed=11)
    feed(model, cache, tokens(generator, 131, rows=2))
    feed(model, cache, tokens(generator, 5, rows=2))
    before = cache.report()
    cache.save(tmp_path / "c")
    loaded = kvest.EvictionCache.load(tmp_path / "c", model)
    with cache.branch():
        for count in (3, 31, 1):
            feed(model, cache, tokens(generator, count, rows=2))
    for row in range(2):
        same_entries(cache.report(), row, before, row, 0.0)
        same_entries(loaded.report(), row, before, row, 0.0)
    twin = copy.deepcopy(loaded)
    for count in (1, 23, *[1] * 9):
        piece = tokens(generator, count, rows=2)
        want = feed(model, twin, piece)
        assert torch.equal(feed(model, loaded, piece), want)
        torch.testing.assert_close(feed(model, cache, piece), want, rtol=1e-4, atol=1e-4)
    for row in range(2):
        same_entries(loaded.report(), row, twin.report(), row, 0.0)


@pytest.mark.parametrize("policy", [ONE_SHOT[1], STANDING[1], STANDING[3], *RECALLED])
def test_rows_can_be_repeated_and_selected(tiny_model, generator, policy):
    model, prompt = tiny_model(layers=2), tokens(generator, 131, rows=2)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, prompt)
    before = cache.report()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    same_entries(cache.report(), 0, before, 1, 0.0)
    same_entries(cache.report(), 1, before, 0, 0.0)
    other = kvest.EvictionCache(model, policy)
    feed(model, other, prompt[[1, 0]])
    question = tokens(generator, 3, rows=2)
    torch.testing.assert_close(feed(model, cache, question), feed(model, other, question), rtol=1e-4, atol=1e-4)


def test_a_cache_that_keeps_all_is_the_stock_cache(tiny_model, generator):
    """Bit for bit: nothing is made where nothing is gone."""
    model, prompt, question = tiny_model(layers=2), tokens(generator, 61), tokens(generator, 7)
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion+centroids(8, share=0.5)@1.0")
    stock = kvest.EvictionCache(model, "h2o/top_k/none@1.0")
    assert torch.equal(feed(model, cache, prompt), feed(model, stock, prompt))
    assert torch.equal(feed(model, cache, question), feed(model, stock, question))
    assert not made(cache.report()).any()


def test_the_queries_that_the_mean_needs_are_remembered(tiny_model, generator):
    """Token by token or at once, and by a proposal that looks at none: the same centroids."""
    model, policy = tiny_model(layers=2), "key_norm/top_k/none+centroids(4, rows=6)@61, every=20"
    prompt, rest = tokens(generator, 61), tokens(generator, 20)
    one_by_one, at_once = (kvest.EvictionCache(model, policy) for _ in range(2))
    feed(model, one_by_one, prompt), feed(model, at_once, prompt)
    singly(model, one_by_one, rest), feed(model, at_once, rest)
    assert one_by_one.report().evictions == [1]
    same_entries(one_by_one.report(), 0, at_once.report(), 0, 1e-4)
    many = kvest.EvictionCache(model, policy.replace("rows=6", "rows=1"))
    feed(model, many, prompt), feed(model, many, rest)
    one, other = (x.report().log_weights[0][0][0][:4] for x in (many, at_once))
    assert (one - other).abs().max() > 0.01
