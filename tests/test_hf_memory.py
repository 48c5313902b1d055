"""Memory is real: bytes are counted from outside, over every tensor alive in the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvest
from hf_tools import WINDOW, feed, hybrid, living_bytes, tokens

UNIFORM = "h2o/systematic/inclusion@0.25"
UNEVEN = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25"


@contextmanager
def bytes_appearing() -> Iterator[list[int]]:
    """A list that gets the bytes of all tensors made meanwhile and still alive, the collector not helping."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        found: list[int] = []
        yield found
        found.append(living_bytes())
    finally:
        gc.unfreeze()
        gc.enable()


def wide_model(dtype=torch.float32):
    """Heads of 64, as common models have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


@pytest.mark.parametrize(
    ("policy", "padded"),
    [
        (UNIFORM, False),
        (UNEVEN, True),
        ("snapkv(11)/top_k/none@61, every=7", False),
        ("h2o(values=True)/poisson/inclusion@61, every=7", True),
    ],
)
def test_kept_bytes_are_all_bytes_that_the_cache_brought(tiny_model, generator, policy, padded):
    """Fault 16: To the byte: after the prompt, with room to append, with queries kept for a later round."""
    model = tiny_model()
    pieces = [tokens(generator, n, rows=2) for n in (131, 1, 1, 5)]
    mask = torch.ones(2, 138, dtype=torch.long)
    if padded:
        mask[1, :37] = 0
        mask[0, 133:135] = 0
    masks = [mask[:, :stop].clone() for stop in (131, 132, 133, 138)]
    feed(model, None, pieces[0])  # what a first pass leaves behind anyway
    for stop in (1, 2, 4):
        with bytes_appearing() as found:
            cache = kvest.EvictionCache(model, policy)
            for piece, so_far in zip(pieces[:stop], masks, strict=False):
                feed(model, cache, piece, so_far)
        assert cache.report().evictions[0] >= 1
        assert cache.report().kept_bytes == found[0]
        del cache


def test_kept_bytes_of_a_hybrid_model_are_all_bytes_that_the_cache_brought(generator):
    model, prompt, more = hybrid(), tokens(generator, 131), tokens(generator, 3)
    feed(model, None, prompt)
    for pieces in ([prompt], [prompt, more]):
        with bytes_appearing() as found:
            cache = kvest.EvictionCache(model, UNEVEN)
            for piece in pieces:
                feed(model, cache, piece)
        assert cache.report().kept_bytes == found[0]
        bounded = [layer for i, layer in enumerate(cache.layers) if i not in cache.report().evicted_layers]
        for layer in bounded:
            assert layer.keys.untyped_storage().nbytes() == 2 * (WINDOW - 1) * 8 * 4
        del cache, bounded, layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [0.5, 0.25, 0.1])
def test_bytes_follow_keep_within_four_percent(generator, dtype, keep):
    """Keys and values of 64 elements; a weight and a position of 4 bytes each come on top."""
    model = wide_model(dtype)
    cache = kvest.EvictionCache(model, f"uniform/systematic/inclusion@{keep}")
    feed(model, cache, tokens(generator, 800))
    report = cache.report()
    stock = 2 * 2 * 800 * 2 * 64 * dtype.itemsize
    assert report.full_bytes == stock
    assert keep * stock < report.kept_bytes <= 1.04 * keep * stock


def test_bytes_follow_the_entries_of_uneven_heads(tiny_model, generator):
    """Fault 1: 72 bytes an entry, two times 8 float32, a weight, a position; none is padded to the longest head."""
    model = tiny_model(heads=5, kv_heads=5)
    cache = kvest.EvictionCache(model, UNEVEN)
    feed(model, cache, tokens(generator, 211))
    report = cache.report()
    assert report.kept.max() > 1.2 * report.kept.min()
    assert report.kept_bytes == 72 * int(report.kept.sum())
    assert report.full_bytes == 64 * 211 * 3 * 5


def test_a_decode_step_goes_over_what_is_held_and_no_more(tiny_model, generator):
    """Fault 2: with counts that differ per head as well, so that fewer entries are less work."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25")
    feed(model, cache, tokens(generator, 400))
    feed(model, cache, tokens(generator, 1))
    kept = cache.report().kept
    assert int(kept.max()) > 1.2 * int(kept.min())
    slots = sum(run.keys.shape[1] * run.keys.shape[2] for layer in cache.layers for run in layer.store.runs())
    assert int(kept.sum()) <= slots <= 1.16 * int(kept.sum())  # room to append: 16 of 100 at most


def test_room_to_append_is_small_and_counted(tiny_model, generator):
    """Not more than 16 free slots a head (or a 64th), and 8 bytes to know where they are."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, UNIFORM)
    feed(model, cache, tokens(generator, 211))
    for _ in range(40):
        feed(model, cache, tokens(generator, 1))
        report = cache.report()
        used = 72 * int(report.kept.sum())
        assert used <= report.kept_bytes <= used + (72 * 16 + 8) * 6


def test_nothing_of_the_prompt_is_held_once_it_is_evicted(tiny_model, generator):
    model = tiny_model()
    prompt = tokens(generator, 997)
    feed(model, None, prompt)
    with bytes_appearing() as found:
        cache = kvest.EvictionCache(model, "h2o(values=True)/systematic/inclusion@31, every=64")
        feed(model, cache, prompt)
    assert found[0] == cache.report().kept_bytes
    assert found[0] < cache.report().full_bytes / 25
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
