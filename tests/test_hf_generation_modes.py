"""Ways to decode besides one token after the other: each is right with an evicted cache, or refused with a way out."""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

import kvest
from hf_tools import POLICIES, feed, hybrid, same_entries, singly, tokens
from kvest.hf.compat import OLDER

ONCE = POLICIES[1]
STANDING = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@61, every=4"
WAYS = [ONCE, STANDING]


def generate(model, ids, cache, **kwargs):
    arguments = {"max_new_tokens": 11, "do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}
    return model.generate(ids, past_key_values=cache, **arguments)


def read(model, policy, ids, **kwargs):
    """A cache that has seen the ids."""
    cache = kvest.EvictionCache(model, policy, **kwargs)
    feed(model, cache, ids)
    return cache


@pytest.fixture(scope="module")
def tokenizer():
    """A word is a token: `w17` is 17."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", clean_up_tokenization_spaces=False)


# -- stopping, sampling, streaming, the pipeline


class AtToken(StoppingCriteria):
    """Stops after a certain token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("policy", WAYS)
def test_a_stopping_criterion_ends_the_answer_and_the_cache_goes_on_from_there(tiny_model, generator, policy):
    model, prompt, question = tiny_model(layers=2), tokens(generator, 131), tokens(generator, 5)
    whole = generate(model, prompt, kvest.EvictionCache(model, policy))
    answer = whole[0, 131:].tolist()
    stop = next(token for token in answer[1:] if token != answer[0])
    cache = kvest.EvictionCache(model, policy)
    cut = generate(model, prompt, cache, stopping_criteria=StoppingCriteriaList([AtToken(stop)]))
    assert cut[0, 131:].tolist() == answer[: answer.index(stop) + 1]
    by_hand = read(model, policy, prompt)
    singly(model, by_hand, cut[:, 131:-1])
    ids = torch.cat([cut, question], dim=1)
    again, copied = generate(model, ids, cache), generate(model, ids, by_hand)
    assert torch.equal(again, copied)
    same_entries(cache.report(), 0, by_hand.report(), 0)


def test_a_row_that_ends_early_leaves_the_others_alone(tiny_model, generator):
    model, prompt = tiny_model(layers=2), tokens(generator, 131, rows=2)
    whole = [generate(model, row[None], kvest.EvictionCache(model, STANDING))[0] for row in prompt]
    end = int(whole[0][131 + 2])
    assert end not in whole[1][131:].tolist()
    out = generate(model, prompt, kvest.EvictionCache(model, STANDING), eos_token_id=end)
    first = whole[0][131:].tolist().index(end) + 131
    assert torch.equal(out[0, : first + 1], whole[0][: first + 1])
    assert not out[0, first + 1 :].any(), "padding"
    assert torch.equal(out[1], whole[1])


@pytest.mark.parametrize("policy", WAYS)
def test_samples_after_an_eviction_are_drawn_from_the_logits_of_the_loop_by_hand(tiny_model, generator, policy):
    """Two sequences of one prompt: each is scored as its tokens are, fed by hand; both hold what the prompt left."""
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    torch.manual_seed(3)
    cache = kvest.EvictionCache(model, policy)
    out = generate(
        model,
        prompt,
        cache,
        do_sample=True,
        num_return_sequences=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert not torch.equal(*out.sequences)
    logits = torch.stack(out.logits, dim=1)
    for row, sequence in enumerate(out.sequences):
        own = read(model, policy, prompt)
        want = singly(model, own, sequence[None, 131:-1])[0]
        torch.testing.assert_close(logits[row, 1:], want, rtol=1e-4, atol=1e-4)
        same_entries(cache.report(), row, own.report(), 0)


def test_a_streamer_is_read_while_another_thread_generates(tiny_model, generator, tokenizer):
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    want = generate(model, prompt, kvest.EvictionCache(model, STANDING))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    cache = kvest.EvictionCache(model, STANDING)
    thread = Thread(target=generate, args=(model, prompt, cache), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer).split() == tokenizer.decode(want[0, 131:]).split()
    thread.join()


def test_the_text_generation_pipeline_takes_a_cache(tiny_model, generator, tokenizer):
    """And a second call with the whole text goes on from there: only the question is read."""
    model, prompt, question = tiny_model(layers=2), tokens(generator, 131), tokens(generator, 5)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    short = GenerationConfig(max_new_tokens=11, do_sample=False)
    cache, by_hand = (kvest.EvictionCache(model, ONCE) for _ in range(2))
    want = prompt
    for more in (prompt, question):
        ids = more if more is prompt else torch.cat([want, more], dim=1)
        said = pipe(tokenizer.decode(ids[0]), past_key_values=cache, generation_config=short, return_tensors=True)
        want = generate(model, ids, by_hand)
        assert said == [{"generated_token_ids": want[0].tolist()}]
    same_entries(cache.report(), 0, by_hand.report(), 0)
    assert cache.report().evictions == [1]


# -- static caches


def test_a_static_cache_beside_ours_is_refused(tiny_model, generator):
    """Fault 10: static caches crash."""
    model, prompt = tiny_model(layers=2), tokens(generator, 31)
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generate(model, prompt, kvest.EvictionCache(model, ONCE), cache_implementation="static")


def test_a_quantised_cache_beside_ours_is_refused(tiny_model, generator):
    """Fault 22: a cache is one or the other, and generate says so."""
    model = tiny_model()
    prompt = tokens(generator, 40)
    with pytest.raises(ValueError, match="cache"):
        generate(model, prompt, kvest.EvictionCache(model, ONCE), cache_implementation="quantized")


def test_a_static_cache_works_on_a_model_that_has_eviction_caches(tiny_model, generator):
    """Fault 10: static caches crash."""
    model, prompt = tiny_model(layers=2), tokens(generator, 31)
    want = generate(model, prompt, StaticCache(config=model.config, max_cache_len=64))
    cache = read(model, ONCE, prompt)
    assert torch.equal(generate(model, prompt, StaticCache(config=model.config, max_cache_len=64)), want)
    assert torch.equal(generate(model, prompt, None, cache_implementation="static"), want)
    assert cache.report().seen.tolist() == [31]


# -- drafts, taken back where they were wrong

DRAFTS = ["prompt lookup", "draft model"]


def drafts(kind, tiny_model):
    how = {"prompt_lookup_num_tokens": 3} if kind == DRAFTS[0] else {"assistant_model": tiny_model(layers=1)}
    return {**how, "eos_token_id": 2}  # older releases look for one


WHOLE = ["h2o/systematic/inclusion@512", "uniform/systematic/inclusion@1.0"]


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("policy", WHOLE)
def test_assisted_decoding_within_the_budget_is_greedy_decoding(tiny_model, generator, kind, policy):
    """Nothing is evicted, so that drafts come and go; a text that repeats itself has some right and some wrong."""
    model = tiny_model(layers=2)
    prompt = tokens(generator, 33).repeat(1, 4)
    cache, by_hand = (kvest.EvictionCache(model, policy) for _ in range(2))
    got = generate(model, prompt, cache, max_new_tokens=30, **drafts(kind, tiny_model))
    want = generate(model, prompt, by_hand, max_new_tokens=30, eos_token_id=2)
    assert torch.equal(got, want)
    question, held = tokens(generator, 7), cache.get_seq_length()
    assert held == 33 * 4 + 29
    torch.testing.assert_close(feed(model, cache, question), feed(model, by_hand, question), rtol=1e-4, atol=1e-4)
    same_entries(cache.report(), 0, by_hand.report(), 0)


ASKED = pytest.mark.skipif(OLDER, reason="before transformers 5.24 generate does not ask the cache before it drafts")


@pytest.mark.skipif(not OLDER, reason="from transformers 5.24 on refused before the first draft, as below")
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_that_an_eviction_has_read_cannot_be_taken_back(tiny_model, generator, kind):
    model, prompt, extra = tiny_model(layers=2), tokens(generator, 97), drafts(kind, tiny_model)
    with pytest.raises(ValueError, match="Assisted decoding over an evicted prompt is not supported"):
        generate(model, prompt, kvest.EvictionCache(model, ONCE), **extra)


@ASKED
@pytest.mark.parametrize("kind", DRAFTS)
def test_assisted_decoding_that_would_evict_drafts_is_refused_with_the_way_out(tiny_model, generator, kind):
    """Drafts that are taken back could already have cost the prompt its entries. The cache is none the worse for it."""
    model, prompt, extra = tiny_model(layers=2), tokens(generator, 97), drafts(kind, tiny_model)
    cache = kvest.EvictionCache(model, ONCE)
    with pytest.raises(ValueError, match=r"is due after this first pass.*Leave out assistant_model and prompt_lookup"):
        generate(model, prompt, cache, **extra)
    assert torch.equal(generate(model, prompt, cache), generate(model, prompt, kvest.EvictionCache(model, ONCE)))
    with pytest.raises(ValueError, match=r"has seen 107 tokens already\. Leave out assistant_model"):
        generate(model, prompt, cache, **extra)
    with pytest.raises(ValueError, match=r"every=4 goes on evicting with them.*Leave out assistant_model"):
        generate(model, prompt, kvest.EvictionCache(model, STANDING), **extra)


@ASKED
def test_assisted_decoding_is_refused_where_sliding_layers_let_go(generator):
    model, prompt = hybrid(), tokens(generator, 97)
    with pytest.raises(ValueError, match=r"layer 0 \(DynamicSlidingWindowLayer\) lets go"):
        generate(model, prompt, kvest.EvictionCache(model, WHOLE[0]), prompt_lookup_num_tokens=3)


# -- contrastive search: candidates are read, and all but one are forgotten


def contrastive(model, ids, cache, candidates, count=9, top_k=4, alpha=0.6):
    """The next token maximises (1 - alpha) p - alpha max_j cos(its hidden state, the j-th one before).

    `candidates(cache, ids)` gives (hidden states [k, d], logits [k, v], what makes the cache hold the chosen one).
    """
    out = model(ids[:, cache.get_seq_length() :], past_key_values=cache, output_hidden_states=True)
    hidden, logits = out.hidden_states[-1][0], out.logits[0, -1]
    for _ in range(count):
        p, tokens_ = torch.softmax(logits, dim=-1).topk(top_k)
        states, all_logits, choose = candidates(cache, tokens_)
        likeness = torch.nn.functional.cosine_similarity(states[:, None], hidden[None], dim=-1).amax(dim=1)
        best = int(((1 - alpha) * p - alpha * likeness).argmax())
        choose(best)
        ids = torch.cat([ids, tokens_[best].view(1, 1)], dim=1)
        hidden, logits = torch.cat([hidden, states[best : best + 1]]), all_logits[best]
    return ids


def step(model, cache, ids):
    out = model(ids, past_key_values=cache, output_hidden_states=True)
    return out.hidden_states[-1][:, -1], out.logits[:, -1]


def together(model):
    """Candidates are rows of a batch that is repeated, and selected from afterwards."""

    def candidates(cache, ids):
        cache.batch_repeat_interleave(len(ids))
        return *step(model, cache, ids[:, None]), lambda best: cache.batch_select_indices(torch.tensor([best]))

    return candidates


def in_turn(model):
    """Candidates are read one after the other, and taken back."""

    def candidates(cache, ids):
        found = []
        for token in ids:
            found.append(step(model, cache, token.view(1, 1)))
            cache.crop(-1)
        states, logits = zip(*found, strict=True)
        return torch.cat(states), torch.cat(logits), lambda best: feed(model, cache, ids[best].view(1, 1))

    return candidates


def on_copies(model):
    """Each candidate is read by a copy of the cache."""

    def candidates(cache, ids):
        found = [step(model, copy.deepcopy(cache), token.view(1, 1)) for token in ids]
        states, logits = zip(*found, strict=True)
        return torch.cat(states), torch.cat(logits), lambda best: feed(model, cache, ids[best].view(1, 1))

    return candidates


@pytest.mark.parametrize(("policy", "way"), [(ONCE, together), (STANDING, together), (ONCE, in_turn)])
@torch.no_grad()
def test_contrastive_search_is_the_search_on_copies_of_the_cache(tiny_model, generator, policy, way):
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    cache, copied = (kvest.EvictionCache(model, policy) for _ in range(2))
    want = contrastive(model, prompt, copied, on_copies(model))
    assert torch.equal(contrastive(model, prompt, cache, way(model)), want)
    same_entries(cache.report(), 0, copied.report(), 0)


@torch.no_grad()
def test_contrastive_search_that_would_take_back_an_evicted_token_is_refused(tiny_model, generator):
    """A standing budget of one token: the candidate's own eviction cannot be undone."""
    model, prompt = tiny_model(layers=2), tokens(generator, 131)
    cache = kvest.EvictionCache(model, "h2o/top_k/none@61, every=1")
    with pytest.raises(ValueError, match=r"cannot take back 1 tokens: only the 0"):
        contrastive(model, prompt, cache, in_turn(model))
