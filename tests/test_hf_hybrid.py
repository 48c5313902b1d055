"""Models with sliding layers: those keep their stock layer, the others are evicted."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvest
from hf_tools import WINDOW, Pieces, feed, hybrid, same_entries, singly, tokens
from kvest.hf.layer import EvictionLayer

POLICIES = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.5",
    "uniform/poisson/inclusion@0.3",
    "snapkv(11)/top_k/none@47, every=5",
)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keep_1_is_stock_bit_for_bit(generator, implementation):
    model = hybrid()
    model.set_attn_implementation(implementation)
    pieces = [tokens(generator, n, rows=2) for n in (97, 13, 1, 1)]
    stock = DynamicCache(config=model.config)
    want = [feed(model, stock, piece) for piece in pieces]
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@1.0")
    for piece, logits in zip(pieces, want, strict=True):
        assert torch.equal(feed(model, cache, piece), logits)


def test_bounded_layers_keep_their_stock_class_and_the_others_are_ours(generator):
    model = hybrid()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 97))
    assert [type(layer) for layer in cache.layers] == 2 * [
        DynamicSlidingWindowLayer,
        DynamicSlidingWindowLayer,
        EvictionLayer,
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_the_twins(generator, policy):
    """Fault 11: windows stay windows, and the other layers are evicted."""
    model = hybrid()
    pieces = Pieces(model, kvest.EvictionCache(model, policy))
    for count in (97, 1, 2, 37, 1, 1):
        pieces.feed(tokens(generator, count))
    assert not pieces.cache.report().kept_whole
    pieces.check()


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("pattern", [["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"]])
def test_a_question_fed_at_once_equals_token_by_token(generator, policy, pattern):
    """Whether the first layer is sliding or full: masks are made for each kind."""
    model = hybrid(pattern=pattern)
    prompt, question = tokens(generator, 97), tokens(generator, 37)
    at_once, one_by_one = (kvest.EvictionCache(model, policy) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    torch.testing.assert_close(
        feed(model, at_once, question), singly(model, one_by_one, question), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_left_padded_row_is_the_row_alone(generator, policy):
    """Also a row that is shorter than the window."""
    model = hybrid()
    ids, more = tokens(generator, 97, rows=3), tokens(generator, 7, rows=3)
    mask = torch.ones(3, 104, dtype=torch.long)
    mask[1, :36], mask[2, :92] = 0, 0
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, ids, mask[:, :97])
    logits = singly(model, batch, more, mask)
    for row, pad in enumerate((0, 36, 92)):
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, ids[row : row + 1, pad:])
        torch.testing.assert_close(logits[row], singly(model, cache, more[row : row + 1])[0], rtol=2e-5, atol=2e-5)
        same_entries(batch.report(), row, cache.report(), 0)


def test_after_a_long_prompt_a_sliding_layer_holds_its_window_only(generator):
    """Keys and values of 15 or 16 tokens, two heads of 8 float32; from the prompt on, and after more tokens."""
    model = hybrid()
    cache = kvest.EvictionCache(model, POLICIES[0])
    for count in (997, 1, 1, 53):
        feed(model, cache, tokens(generator, count))
        for layer in cache.layers:
            if not isinstance(layer, EvictionLayer):
                for x in (layer.keys, layer.values):
                    assert (WINDOW - 1) * 64 <= x.untyped_storage().nbytes() <= WINDOW * 64


@pytest.mark.parametrize("policy", ["h2o(values=True)/systematic/inclusion@", "snapkv+one_threshold/top_k/none@"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hybrid_model", [False, True])
def test_a_budget_in_bytes_is_held(tiny_model, generator, policy, rows, hybrid_model):
    """After the prompt, and after each turn of a standing budget with no room to append in use."""
    model = hybrid() if hybrid_model else tiny_model()
    evicted = 2 if hybrid_model else 3
    size = 2**15 * rows
    cache = kvest.EvictionCache(model, f"{policy}{size}B, every=32")
    entry = 72 * 2 * evicted * rows
    for count in (400, 64, 100):
        feed(model, cache, tokens(generator, count, rows=rows))
        held = cache.report().kept_bytes
        assert size - entry - 4096 < held <= size
    assert cache.report().evictions == [3] * rows
