"""The ordinary `generate()`: every way of calling it works, and greedy decoding is the loop by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, TextStreamer

import kvest
from hf_tools import POLICIES, feed, hybrid, same_entries, singly, tokens
from kvest.hf.compat import OLDER

STANDING = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@61, every=4"


def generate(model, ids, cache, name="past_key_values", **kwargs):
    arguments = {"max_new_tokens": 11, "do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}
    return model.generate(ids, **{name: cache}, **arguments)


def greedy(model, ids, cache, count):
    """The most likely tokens, one after the other."""
    for _ in range(count):
        ids = torch.cat([ids, feed(model, cache, ids[:, cache.get_seq_length() :])[:, -1:].argmax(dim=-1)], dim=1)
    return ids


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *((policy, "past_key_values") for policy in (*POLICIES, STANDING)),
        *((STANDING, n) for n in ("cache",) if not OLDER),
    ],
)
def test_greedy_is_the_loop_by_hand_with_both_names_of_the_cache(tiny_model, generator, policy, name):
    model, prompt = tiny_model(layers=2), tokens(generator, 131, rows=2)
    cache, by_hand = (kvest.EvictionCache(model, policy) for _ in range(2))
    assert torch.equal(generate(model, prompt, cache, name), greedy(model, prompt, by_hand, 11))
    for row in range(2):
        same_entries(cache.report(), row, by_hand.report(), row)
    assert cache.report().seen.tolist() == [141, 141]


def test_greedy_of_a_hybrid_model_is_the_loop_by_hand(generator):
    model, prompt = hybrid(), tokens(generator, 131)
    cache, by_hand = (kvest.EvictionCache(model, STANDING) for _ in range(2))
    assert torch.equal(generate(model, prompt, cache), greedy(model, prompt, by_hand, 11))
    same_entries(cache.report(), 0, by_hand.report(), 0)


def test_a_document_read_first_and_then_generate_over_all_ids(tiny_model, generator):
    """The question is new to the cache; a second question goes on from there."""
    model = tiny_model(layers=2)
    document, first, second = (tokens(generator, n) for n in (131, 7, 5))
    cache, by_hand = (kvest.EvictionCache(model, POLICIES[1]) for _ in range(2))
    feed(model, cache, document), feed(model, by_hand, document)
    ids = torch.cat([document, first], dim=1)
    ids = generate(model, ids, cache)
    assert torch.equal(ids, greedy(model, torch.cat([document, first], dim=1), by_hand, 11))
    ids = torch.cat([ids, second], dim=1)
    assert torch.equal(generate(model, ids, cache), greedy(model, ids, by_hand, 11))
    assert cache.report().evictions == [1]
    same_entries(cache.report(), 0, by_hand.report(), 0)


def test_a_prompt_within_the_budget_is_generated_as_stock(tiny_model, generator):
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    want = generate(model, prompt, DynamicCache(config=model.config))
    cache = kvest.EvictionCache(model, "h2o/systematic/inclusion@512")
    assert torch.equal(generate(model, prompt, cache), want)
    assert cache.report().kept_whole
    assert cache.report().kept.unique().tolist() == [141]


def test_sampling_and_several_sequences_draw_what_the_same_logits_would(tiny_model, generator):
    """Fault 23: At keep = 1 the samples are those of a stock cache."""
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    kwargs = {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9}
    outputs = []
    for cache in (DynamicCache(config=model.config), kvest.EvictionCache(model, "h2o/systematic/inclusion@1.0")):
        torch.manual_seed(7)
        outputs.append(generate(model, prompt, cache, **kwargs))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0][0], outputs[0][1])
    evicted = kvest.EvictionCache(model, STANDING)
    assert generate(model, prompt, evicted, **kwargs).shape == (3, 142)
    assert evicted.report().seen.tolist() == [141] * 3


@pytest.mark.parametrize("policy", ["uniform/systematic/inclusion@1.0", POLICIES[0], STANDING])
def test_beams_equal_a_search_that_reads_each_hypothesis_anew(tiny_model, generator, policy):
    """Rows are reordered at every step; each beam's score is the one its tokens get alone, after the same prompt."""
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    cache = kvest.EvictionCache(model, policy)
    out = generate(
        model,
        prompt,
        cache,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=7,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=0.0,
    )
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        own = kvest.EvictionCache(model, policy)
        logits = [feed(model, own, prompt)[0, -1]]
        logits += [feed(model, own, token.view(1, 1))[0, -1] for token in sequence[131:-1]]
        each = [torch.log_softmax(step, dim=-1)[token] for step, token in zip(logits, sequence[131:], strict=True)]
        torch.testing.assert_close(sum(each), score, rtol=1e-4, atol=1e-4)
    assert len({tuple(sequence.tolist()) for sequence in out.sequences}) == 3


def test_rows_can_be_repeated_selected_and_reordered(tiny_model, generator):
    """What beam search and prompts shared by several answers do to a cache, between two rounds, with padding about."""
    model = tiny_model(layers=2)
    prompt, more = tokens(generator, 131, rows=2), tokens(generator, 9, rows=5)
    mask = torch.ones(2, 133, dtype=torch.long)
    mask[1, :60], mask[1, 132] = 0, 0
    cache = kvest.EvictionCache(model, STANDING)
    feed(model, cache, prompt, mask[:, :131])
    singly(model, cache, more[:2, :2], mask)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 3, 4, 5, 1]))
    cache.reorder_cache(torch.tensor([1, 0, 2, 4, 3]))
    source = [1, 0, 1, 0, 1]
    longer = torch.cat([mask[source], torch.ones(5, 7, dtype=torch.long)], dim=1)
    logits = singly(model, cache, more[:, 2:], longer)
    for row, origin in enumerate(source):
        own = kvest.EvictionCache(model, STANDING)
        feed(model, own, prompt[origin : origin + 1, 60 * origin :])
        singly(model, own, more[origin : origin + 1, : 2 - origin])
        want = singly(model, own, more[row : row + 1, 2:])
        torch.testing.assert_close(logits[row], want[0], rtol=2e-5, atol=2e-5)
        assert own.report().evictions == [3]
        same_entries(cache.report(), row, own.report(), 0)


def test_streaming_works(tiny_model, generator):
    class Tokens(TextStreamer):
        """Collects what it is handed."""

        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.flatten())

        def end(self):
            self.got = torch.cat(self.got)

    model, prompt, streamer = tiny_model(layers=2), tokens(generator, 131), Tokens()
    out = generate(model, prompt, kvest.EvictionCache(model, STANDING), streamer=streamer)
    assert torch.equal(streamer.got, out[0])
