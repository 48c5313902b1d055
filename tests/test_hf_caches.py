"""State lives on the cache: two on one model know nothing of each other, and can be emptied, dropped and used again."""

from __future__ import annotations

import gc
import weakref

import torch

import kvest
from hf_tools import feed, same_entries, singly, tokens

POLICIES = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25, every=5",
    "uniform/poisson/inclusion@0.4",
)


def test_two_caches_interleaved_on_one_model_equal_two_separate_runs(tiny_model, generator):
    """Fault 4: Prompt A, prompt B, then turn by turn; bit for bit."""
    model = tiny_model()
    texts = [[tokens(generator, n) for n in sizes] for sizes in ((131, 11, 1, 1, 7), (83, 2, 1, 1, 29))]
    caches = [kvest.EvictionCache(model, policy, seed) for seed, policy in enumerate(POLICIES)]
    interleaved = [[feed(model, cache, text[i]) for cache, text in zip(caches, texts, strict=True)] for i in range(5)]
    for which, text in enumerate(texts):
        cache = kvest.EvictionCache(model, POLICIES[which], which)
        for i, piece in enumerate(text):
            assert torch.equal(feed(model, cache, piece), interleaved[i][which])
        same_entries(cache.report(), 0, caches[which].report(), 0, 0)


def test_reset_makes_a_cache_as_good_as_new(tiny_model, generator):
    model = tiny_model()
    first, second, question = tokens(generator, 131), tokens(generator, 83, rows=2), tokens(generator, 7, rows=2)
    used = kvest.EvictionCache(model, POLICIES[0])
    feed(model, used, first), singly(model, used, first[:, :9])
    used.reset()
    assert used.get_seq_length() == 0
    assert used.report().kept_bytes == 0
    fresh = kvest.EvictionCache(model, POLICIES[0])
    for piece in (second, question):
        assert torch.equal(feed(model, used, piece), feed(model, fresh, piece))
    same_entries(used.report(), 1, fresh.report(), 1, 0)


def test_a_dropped_cache_is_gone_at_once(tiny_model, generator):
    """No reference cycle, and nothing on the model, keeps keys alive until the collector comes."""
    model = tiny_model()
    for policy in POLICIES:
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, tokens(generator, 131)), singly(model, cache, tokens(generator, 6))
        layer = cache.layers[1]
        watched = [weakref.ref(x) for x in (cache, cache.session, layer, layer.store.keys)]
        gc.collect()
        gc.disable()
        try:
            del cache, layer
            assert [ref() for ref in watched] == [None] * 4
        finally:
            gc.enable()


def test_a_cache_does_not_keep_its_model_alive(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 131))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    assert cache.report().seen.tolist() == [131]
