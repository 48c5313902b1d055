"""Many questions over one document: a branch returns the cache to where it was, without a copy of what it holds."""

from __future__ import annotations

import copy

import pytest
import torch

import kvest
from families import FAMILIES, RECURRENT, named
from hf_tools import POLICIES, feed, hybrid, same_entries, tokens

STANDING = ("h2o+one_threshold/systematic/inclusion@24, every=8", "snapkv/top_k/none@0.3, every=4")


def same_report(report: kvest.Report, other: kvest.Report) -> None:
    assert report.seen.tolist() == other.seen.tolist()
    for row in range(len(report.seen)):
        same_entries(report, row, other, row, tolerance=0.0)


@pytest.mark.parametrize("policy", [*POLICIES, *STANDING])
def test_after_a_branch_the_cache_is_where_it_was(tiny_model, generator, policy):
    """Fault 15: entries are the same, later tokens get the logits that they get without the branch."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, policy, seed=3)
    feed(model, cache, tokens(generator, 61))
    before, twin = cache.report(), copy.deepcopy(cache)
    asked = tokens(generator, 37)
    with cache.branch() as same:
        assert same is cache
        first = feed(model, cache, asked)
        for i in range(12):  # far enough for a standing budget to evict
            feed(model, cache, tokens(generator, 1 + i % 2))
        assert cache.report().seen.item() > before.seen.item()
    same_report(cache.report(), before)
    with cache.branch():
        again = feed(model, cache, asked)
    torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-5)
    after = tokens(generator, 19)
    torch.testing.assert_close(feed(model, cache, after), feed(model, twin, after), rtol=1e-5, atol=1e-5)
    same_report(cache.report(), twin.report())


@pytest.mark.parametrize("policy", [POLICIES[1], *STANDING])
def test_rows_of_a_padded_batch_return(tiny_model, generator, policy):
    model = tiny_model()
    ids, mask = tokens(generator, 47, rows=2), torch.ones(2, 47, dtype=torch.int64)
    mask[1, :11] = 0
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, ids, mask)
    before, twin = cache.report(), copy.deepcopy(cache)
    question = torch.ones(2, 13, dtype=torch.int64)
    question[0, :5] = 0
    with cache.branch():
        feed(model, cache, tokens(generator, 13, rows=2), torch.cat([mask, question], dim=1))
    same_report(cache.report(), before)
    after = tokens(generator, 7, rows=2)
    mask = torch.cat([mask, torch.ones(2, 7, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(feed(model, cache, after, mask), feed(model, twin, after, mask), rtol=1e-5, atol=1e-5)
    same_report(cache.report(), twin.report())


@pytest.mark.parametrize("prompt", [9, 61])
def test_bounded_layers_return_too(generator, prompt):
    """Below and beyond the sliding window."""
    model = hybrid()
    cache = kvest.EvictionCache(model, "snapkv/top_k/none@0.5")
    feed(model, cache, tokens(generator, prompt))
    twin = copy.deepcopy(cache)
    with cache.branch():
        feed(model, cache, tokens(generator, 23))
    after = tokens(generator, 7)
    assert torch.equal(feed(model, cache, after), feed(model, twin, after))
    same_report(cache.report(), twin.report())


@pytest.mark.parametrize("name", named(*RECURRENT))
def test_layers_with_a_recurrent_state_return_too(generator, name):
    """They write into their state in place."""
    model = FAMILIES[name]()
    cache = kvest.EvictionCache(model, "snapkv/top_k/none@0.5")
    feed(model, cache, tokens(generator, 41))
    twin = copy.deepcopy(cache)
    with cache.branch():
        for n in (7, 1, 1):
            feed(model, cache, tokens(generator, n))
    after = tokens(generator, 1)
    assert torch.equal(feed(model, cache, after), feed(model, twin, after))


def test_a_branch_may_generate_in_any_way(tiny_model, generator):
    """Beams and several sequences multiply the rows; afterwards there is one again."""
    model = tiny_model()
    document = tokens(generator, 53)
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@0.4")
    feed(model, cache, document)
    before = cache.report()
    asked = torch.cat([document, tokens(generator, 5)], dim=1)
    greedy = {"max_new_tokens": 6, "past_key_values": cache, "attention_mask": torch.ones_like(asked)}
    with cache.branch():
        first = model.generate(asked, do_sample=False, **greedy)
    with cache.branch():
        cache.batch_repeat_interleave(3)
        model.generate(asked, num_beams=3, do_sample=False, **greedy)
    with cache.branch():
        cache.batch_repeat_interleave(2)
        assert model.generate(asked, num_return_sequences=2, do_sample=True, **greedy).shape[0] == 2
    same_report(cache.report(), before)
    with cache.branch():
        assert torch.equal(model.generate(asked, do_sample=False, **greedy), first)


def test_branches_nest(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, STANDING[0])
    feed(model, cache, tokens(generator, 41))
    with cache.branch():
        feed(model, cache, tokens(generator, 17))
        middle = cache.report()
        with cache.branch():
            feed(model, cache, tokens(generator, 29))
            cache.reset()
        same_report(cache.report(), middle)
        feed(model, cache, tokens(generator, 3))
    assert cache.report().seen.item() == 41


def test_an_error_in_a_branch_ends_it(tiny_model, generator):
    """Even one in the middle of a forward pass, after which nothing but a return helps."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 41))
    before = cache.report()

    def fail(*_: object) -> None:
        raise InterruptedError("in the second layer")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError), cache.branch():
        feed(model, cache, tokens(generator, 5))
    hook.remove()
    same_report(cache.report(), before)
    feed(model, cache, tokens(generator, 5))


def test_what_is_held_is_not_copied(tiny_model, generator):
    """The first branch makes room behind the entries once; later ones write there and leave the rest in place."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[1])
    feed(model, cache, tokens(generator, 200))
    with cache.branch():
        feed(model, cache, tokens(generator, 9))
    places = [layer.store.keys.data_ptr() for layer in cache.layers]
    held = cache.report().kept_bytes
    for _ in range(3):
        with cache.branch():
            feed(model, cache, tokens(generator, 9))
            assert cache.report().kept_bytes == held
        assert [layer.store.keys.data_ptr() for layer in cache.layers] == places
    assert cache.report().kept_bytes == held


def test_what_waits_for_the_return_is_counted(tiny_model, generator):
    """A branch that evicts holds its own entries beside those to which it returns."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "keydiff/systematic/inclusion@400, every=8")
    feed(model, cache, tokens(generator, 900))
    held = cache.report().kept_bytes
    with cache.branch():
        feed(model, cache, tokens(generator, 60))
        assert cache.report().kept_bytes >= 1.9 * held
    assert cache.report().kept_bytes < 1.3 * held  # room to append, but one copy


def test_a_branch_cannot_take_back_what_came_before_it(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 41))
    feed(model, cache, tokens(generator, 6))
    with cache.branch():
        feed(model, cache, tokens(generator, 4))
        cache.crop(-3)
        with pytest.raises(ValueError, match="cannot take back 2 tokens within a branch that has added 1"):
            cache.crop(-2)
    cache.crop(-6)
    assert cache.report().seen.item() == 41


def test_a_branch_of_a_cache_that_is_not_evicted_yet(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, "snapkv/top_k/none@64")
    feed(model, cache, tokens(generator, 30))
    twin = copy.deepcopy(cache)
    with cache.branch():
        feed(model, cache, tokens(generator, 50))
    after = tokens(generator, 7)
    assert torch.equal(feed(model, cache, after), feed(model, twin, after))


def test_a_branch_after_inference_mode(tiny_model, generator):
    """The document may be read in inference mode and the branch closed outside of it."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    with torch.inference_mode():
        model(tokens(generator, 41), past_key_values=cache)
    before = cache.report()
    with cache.branch(), torch.inference_mode():
        model(tokens(generator, 5), past_key_values=cache)
    same_report(cache.report(), before)
    feed(model, cache, tokens(generator, 5))
