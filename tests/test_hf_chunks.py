"""Chunked prefill and several turns: the budget holds after every chunk, and a one-shot policy says that it cannot."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import Pieces, feed, prefill_chunks, same_entries, tokens

CHUNKED = ("h2o(values=True)+one_threshold/systematic/tempered(0.85)@47, every=7", "snapkv(11)/top_k/none@0.4, every=7")


@pytest.mark.parametrize(("policy", "budgets"), [(CHUNKED[0], [47] * 5), (CHUNKED[1], [21, 42, 63, 84, 106])])
def test_chunked_prefill_by_hand_holds_the_budget_after_every_chunk(tiny_model, generator, policy, budgets):
    """Fault 7: the budget holds after each of them, not the first alone."""
    model = tiny_model()
    pieces = Pieces(model, kvest.EvictionCache(model, policy))
    for number, budget in enumerate(budgets, start=1):
        pieces.feed(tokens(generator, 53))
        report = pieces.cache.report()
        assert report.kept.double().mean() == budget
        assert report.evictions == [number]
        assert report.seen.tolist() == [53 * number]
    pieces.check()


def test_generate_with_a_prefill_chunk_size_is_the_chunks_by_hand(tiny_model, generator):
    model = tiny_model()
    prompt = tokens(generator, 151)
    cache, by_hand = (kvest.EvictionCache(model, CHUNKED[0]) for _ in range(2))
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        prefill_chunk_size=37,
        max_new_tokens=5,
        do_sample=False,
    )
    chosen = []
    for chunk in prefill_chunks(prompt, 37):
        logits = feed(model, by_hand, chunk)
    for _ in range(5):
        chosen.append(logits[:, -1:].argmax(dim=-1))
        logits = feed(model, by_hand, chosen[-1]) if len(chosen) < 5 else None
    assert torch.equal(out[:, 151:], torch.cat(chosen, dim=1))
    assert cache.report().evictions == [4], "after every chunk but the first, which is within the budget"
    same_entries(cache.report(), 0, by_hand.report(), 0)


def test_a_chunked_prefill_of_a_padded_batch_is_each_row_alone(tiny_model, generator):
    """The short row's first chunk is one real token; its later chunks are whole."""
    model = tiny_model()
    ids = tokens(generator, 4 * 31, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    batch = kvest.EvictionCache(model, CHUNKED[0])
    alone = [kvest.EvictionCache(model, CHUNKED[0]) for _ in range(2)]
    for start in range(0, ids.shape[1], 31):
        logits = feed(model, batch, ids[:, start : start + 31], mask[:, : start + 31])
        for row, cache in enumerate(alone):
            real = mask[row, start : start + 31].bool()
            want = feed(model, cache, ids[row : row + 1, start : start + 31][:, real])
            torch.testing.assert_close(logits[row, real], want[0], rtol=2e-5, atol=2e-5)
            same_entries(batch.report(), row, cache.report(), 0)


@pytest.mark.parametrize("budget", ["0.4", "47"], ids=["first chunk evicted", "first chunk within the budget"])
def test_a_one_shot_policy_warns_of_a_chunked_prefill(tiny_model, generator, budget):
    model = tiny_model()
    prompt = tokens(generator, 75)  # two whole chunks, and a last token that older releases read alone
    cache = kvest.EvictionCache(model, f"snapkv/top_k/none@{budget}")
    with pytest.warns(UserWarning, match=r"looks? like a chunked prefill.*every=N"):
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            prefill_chunk_size=37,
            max_new_tokens=1,
        )


def test_turns_of_other_lengths_under_a_one_shot_policy_warn_of_nothing(tiny_model, generator):
    """Warnings are errors here. What came after the prompt stays whole and exact."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "uniform/systematic/inclusion@0.4")
    for count in (74, 5, 1, 74, 1, 1):
        feed(model, cache, tokens(generator, count))
    report = cache.report()
    assert report.evictions == [1]
    assert report.kept.unique().tolist() == [29 + 82]
    assert torch.equal(report.positions[1][0][1][29:], torch.arange(74, 74 + 82))
    assert report.log_weights[1][0][1][29:].abs().max() == 0


def test_later_turns_are_evicted_under_a_standing_fraction(tiny_model, generator):
    """Fault 8: 100 + 300 tokens at half: 50, then 200; not 350."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "uniform/systematic/inclusion@0.5, every=64")
    feed(model, cache, tokens(generator, 100))
    assert cache.report().kept.unique().tolist() == [50]
    feed(model, cache, tokens(generator, 300))
    assert cache.report().kept.unique().tolist() == [200]


def test_chunks_within_the_budget_warn_of_nothing(tiny_model, generator):
    model = tiny_model()
    for budget in ("1.0", "256"):
        cache = kvest.EvictionCache(model, f"snapkv/top_k/none@{budget}")
        feed(model, cache, tokens(generator, 37)), feed(model, cache, tokens(generator, 37))
        assert cache.report().kept.unique().tolist() == [74]
