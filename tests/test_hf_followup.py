"""After an eviction: what a question sees does not depend on how it is fed, and is what the report says."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import kvest
from hf_tools import HEADS, POLICIES, Pieces, feed, same_entries, sharpen, singly, tokens


@pytest.mark.parametrize(("policy", "count"), [(POLICIES[2], 2), *((policy, 37) for policy in POLICIES)])
def test_a_question_fed_at_once_equals_token_by_token(tiny_model, generator, policy, count):
    """Fault 5: whatever the counts of the heads and the length of the question."""
    model = tiny_model(layers=2)
    prompt, question = tokens(generator, 211), tokens(generator, count)
    at_once, one_by_one = (kvest.EvictionCache(model, policy) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    torch.testing.assert_close(
        feed(model, at_once, question), singly(model, one_by_one, question), rtol=1e-5, atol=1e-5
    )


def test_a_question_of_a_thousand_tokens_equals_token_by_token(tiny_model, generator):
    """Fault 3: Longer than the cache, and through many steps of growing storage."""
    model = tiny_model(layers=1)
    prompt, question = tokens(generator, 211), tokens(generator, 1000)
    at_once, one_by_one = (kvest.EvictionCache(model, POLICIES[1]) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    torch.testing.assert_close(
        feed(model, at_once, question), singly(model, one_by_one, question), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_a_model_without_a_cache_that_weighs_what_the_report_lists(
    tiny_model, generator, policy, heads
):
    """The twin knows nothing of storage: entries stay in place, evicted ones are masked, kept ones weighted."""
    model = tiny_model(heads=heads[0], kv_heads=heads[1], layers=2)
    pieces = Pieces(model, kvest.EvictionCache(model, policy))
    for count in (131, 1, 2, 37, 1):
        pieces.feed(tokens(generator, count))
    pieces.check()


def test_a_question_longer_than_the_prompt_is_the_twins(tiny_model, generator):
    model = tiny_model(layers=2)
    pieces = Pieces(model, kvest.EvictionCache(model, POLICIES[2]))
    for count in (131, 1000, 1):
        pieces.feed(tokens(generator, count))
    pieces.check()


def test_eviction_is_seen_in_the_logits(tiny_model, generator):
    """Guards the tests above: were nothing evicted or nothing weighted, they would compare equal things."""
    model = tiny_model()
    prompt, question = tokens(generator, 211), tokens(generator, 37)
    logits = {}
    for policy in ("uniform/systematic/none@1.0", "uniform/systematic/none@0.2", "uniform/systematic/inclusion@0.2"):
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, prompt)
        logits[policy] = feed(model, cache, question)
    whole, forgotten, weighted = logits.values()
    assert (whole - forgotten).abs().max() > 0.1
    assert (weighted - forgotten).abs().max() > 0.1


def test_the_policies_of_these_tests_give_heads_different_counts(tiny_model, generator):
    """Guards the tests above: equal counts would hide a wrong offset."""
    model, prompt = tiny_model(), tokens(generator, 211)
    for policy in POLICIES:
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, prompt)
        counts = cache.report().kept.unique()
        assert (len(counts) > 1) == any(part in policy for part in ("one_threshold", "poisson", "with_replacement"))


def test_a_model_with_learned_positions_and_no_rotation(generator):
    """gpt2 adds positions by the number of tokens seen, which is not the number held."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
    model = sharpen(GPT2LMHeadModel(config).eval(), 8.0)
    prompt, question = tokens(generator, 131), tokens(generator, 13)
    whole = kvest.EvictionCache(model, "h2o/systematic/inclusion@1.0")
    stock = DynamicCache(config=model.config)
    for piece in (prompt, question):
        assert torch.equal(feed(model, whole, piece), feed(model, stock, piece))
    at_once, one_by_one = (kvest.EvictionCache(model, POLICIES[4]) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    torch.testing.assert_close(
        feed(model, at_once, question), singly(model, one_by_one, question), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_in_bfloat16_a_question_at_once_is_token_by_token_up_to_rounding(tiny_model, generator, policy):
    """Weights stay in float32: the same entries, and logits as close as bfloat16 gets (8 bits) in three layers."""
    model = tiny_model().to(torch.bfloat16)
    prompt, question = tokens(generator, 211), tokens(generator, 13)
    at_once, one_by_one = (kvest.EvictionCache(model, policy) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    together, apart = feed(model, at_once, question).float(), singly(model, one_by_one, question).float()
    assert (together - apart).abs().mean() < 0.02 * apart.abs().mean()
    assert at_once.report().log_weights[0][0][0].dtype == torch.float32
    same_entries(at_once.report(), 0, one_by_one.report(), 0, 0)
