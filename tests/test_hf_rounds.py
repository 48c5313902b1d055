"""A standing budget (`every=N`): it holds in every turn, after every chunk, and while decoding."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import Pieces, feed, same_entries, tokens

EVERY = 7
STANDING = (
    "uniform/systematic/inclusion@61, every=7",
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@61, every=7",
    "with_certain(snapkv(11), by=keydiff, share=0.4)/poisson/inclusion@61, every=7",
    "snapkv(11)/top_k/none@61, every=7",
    "output_error/systematic/tempered(auto)@61, every=7",
    "capkv/systematic/inclusion@61, every=7",
)


SOME = (STANDING[0], STANDING[1], STANDING[3])
FIXED = tuple(policy for policy in STANDING if "poisson" not in policy)


def mean_kept(report):
    """Entries per head of each row, averaged over heads and layers."""
    return report.kept[report.evicted_layers].double().mean(dim=(0, 2))


@pytest.mark.parametrize("policy", FIXED)
def test_the_budget_holds_while_decoding(tiny_model, generator, policy):
    """Never more than the budget and N - 1 between passes; every round comes back to the budget."""
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, tokens(generator, 131))
    assert mean_kept(cache.report()) == 61
    rounds = 1
    for step in range(1, 2 * EVERY + 3):
        feed(model, cache, tokens(generator, 1))
        report = cache.report()
        rounds += step % EVERY == 0
        assert report.seen.tolist() == [131 + step]
        assert mean_kept(report) == 61 + step % EVERY
        assert report.evictions == [rounds]


@pytest.mark.parametrize("policy", STANDING)
def test_logits_and_weights_after_several_rounds_are_the_twins(tiny_model, generator, policy):
    model = tiny_model(layers=2)
    pieces = Pieces(model, kvest.EvictionCache(model, policy))
    for count in (131, 1, 1, 1, 1, 1, 1, 1, 1, 29, 2, 1, 83):
        pieces.feed(tokens(generator, count))
    assert pieces.cache.report().evictions[0] >= 4
    pieces.check()


@pytest.mark.parametrize("policy", STANDING)
def test_rounds_keep_sinks_and_window_order_and_weights(tiny_model, generator, policy):
    """Fault 9: What one round did not keep never comes back, and a weight never falls."""
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, tokens(generator, 131))
    before = cache.report()
    grew = False
    for count in (29, 1, 1, 1, 1, 1, 1, 1, 83, 40):
        feed(model, cache, tokens(generator, count))
        report = cache.report()
        seen = int(report.seen)
        for layer in range(2):
            for head in range(2):
                where, weight = report.positions[layer][0][head], report.log_weights[layer][0][head]
                assert (where.diff() > 0).all()
                assert torch.equal(where[:4], torch.arange(4))
                assert torch.equal(where[-16:], torch.arange(seen - 16, seen))
                assert weight.min() >= 0
                assert weight[:4].max() == 0
                assert weight[-16:].max() == 0
                old = dict(
                    zip(before.positions[layer][0][head].tolist(), before.log_weights[layer][0][head], strict=True)
                )
                new = dict(zip(where.tolist(), weight, strict=True))
                assert all(position in old for position in new if position < seen - count)
                kept = [position for position in new if position in old]
                assert all(new[position] >= old[position] for position in kept)
                grew |= any(new[position] > old[position] > 0 for position in kept)
        before = report
    assert grew == ("top_k" not in policy)


@pytest.mark.parametrize(
    ("policy", "lengths"), [(policy, (89, n)) for n in (67, 30) for policy in STANDING if n == 67 or policy in SOME]
)
def test_rows_of_different_lengths_are_evicted_independently(tiny_model, generator, policy, lengths):
    """Rows come due at different steps (one of 30 tokens long after the other); each holds what it holds alone."""
    model = tiny_model(layers=2)
    rows = [tokens(generator, n) for n in lengths]
    pad = lengths[0] - lengths[1]
    ids = torch.cat([rows[0], torch.cat([torch.zeros(1, pad, dtype=torch.long), rows[1]], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    batch = kvest.EvictionCache(model, policy)
    own = [kvest.EvictionCache(model, policy) for _ in rows]
    feed(model, batch, ids, mask)
    for cache, row in zip(own, rows, strict=True):
        feed(model, cache, row)
    pieces = [tokens(generator, n, rows=2) for n in (*[1] * 8, 31, *[1] * 5)]
    skipped = {2: 1, 9: 0, 10: 1, 11: 1}  # piece -> the row that is padding there: the rows fall out of step
    for number, piece in enumerate(pieces):
        real = torch.ones_like(piece)
        if number in skipped:
            real[skipped[number]] = 0
        mask = torch.cat([mask, real], dim=1)
        logits = feed(model, batch, piece, mask)
        for i, cache in enumerate(own):
            if skipped.get(number) != i:
                want = feed(model, cache, piece[i : i + 1])
                torch.testing.assert_close(logits[i], want[0], rtol=2e-5, atol=2e-5)
            if number in (7, 8, 13):
                same_entries(batch.report(), i, cache.report(), 0, 2e-5)
