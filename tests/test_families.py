"""Families of models, on tiny random ones: right under eviction, or refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvest
import reference_sampling as reference
from families import FAMILIES, RECURRENT, family, named
from hf_tools import feed, same_entries, singly, tokens
from kvest.attend import attend
from kvest.hf.compat import OLDER
from kvest.hf.layer import EvictionLayer
from kvest.retain import Store
from kvest.types import Retained

POLICY = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.4"
NEAR = {"rtol": 1e-5, "atol": 1e-5}
GEMMA3N = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"],
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": None,
    "intermediate_size": [32, 32, 32, 32],
}


@pytest.mark.parametrize("name", named(*FAMILIES))
def test_keep_1_is_stock_bit_for_bit(name, generator):
    model, prompt, question = FAMILIES[name](), tokens(generator, 97, rows=2), tokens(generator, 5, rows=2)
    logits = []
    for cache in (DynamicCache(config=model.config), kvest.EvictionCache(model, "h2o/systematic/inclusion@1.0")):
        logits.append([feed(model, cache, prompt), feed(model, cache, question), singly(model, cache, question)])
    for want, got in zip(*logits, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", named(*FAMILIES))
def test_a_question_at_once_is_token_by_token(name, generator):
    model, prompt, question = FAMILIES[name](), tokens(generator, 97, rows=2), tokens(generator, 13, rows=2)
    at_once, one_by_one = (kvest.EvictionCache(model, POLICY) for _ in range(2))
    feed(model, at_once, prompt), feed(model, one_by_one, prompt)
    assert at_once.report().evictions == [1, 1]
    torch.testing.assert_close(feed(model, at_once, question), singly(model, one_by_one, question), **NEAR)


@pytest.mark.parametrize("name", named(*FAMILIES))
def test_a_left_padded_row_is_the_row_alone(name, generator):
    """Through a standing budget: evicted after the prompt, and again."""
    model, policy = FAMILIES[name](), f"{POLICY}, every=4"
    prompt, more = tokens(generator, 97, rows=2), tokens(generator, 11, rows=2)
    mask = torch.ones(2, 108, dtype=torch.long)
    mask[1, :31] = 0
    batch = kvest.EvictionCache(model, policy)
    feed(model, batch, prompt, mask[:, :97])
    logits = singly(model, batch, more, mask)
    for row, pad in enumerate((0, 31)):
        cache = kvest.EvictionCache(model, policy)
        feed(model, cache, prompt[row : row + 1, pad:])
        torch.testing.assert_close(logits[row], singly(model, cache, more[row : row + 1])[0], **NEAR)
        assert cache.report().evictions[0] > 1
        same_entries(batch.report(), row, cache.report(), 0)


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("counts", [((11, 11),), ((5, 17),)])
@pytest.mark.parametrize("width", [8, 7])
def test_a_learned_sink_is_an_entry_without_a_key_and_a_value(q, counts, width, generator):
    """Query by query and head by head, in float64. The width of values decides which kernel is used."""
    n, group = sum(counts[0]), 3
    keys, values = torch.randn(n, 8, generator=generator), 1 + torch.randn(n, width, generator=generator)
    log_weights, sinks = torch.rand(n, generator=generator), 2 * torch.randn(2 * group, generator=generator)
    position = torch.cat([torch.arange(each, dtype=torch.int32) for each in counts[0]])
    held = Store(Retained(keys, values, log_weights, position, counts))
    new = torch.randn(1, 2, q, 8, generator=generator), torch.randn(1, 2, q, width, generator=generator)
    held.append(*new, 100 + torch.arange(q)[None])
    queries = torch.randn(1, 2 * group, q, 8, generator=generator)
    got = attend(queries, held, 0.35, sinks=sinks)
    for head in range(2 * group):
        k, v, l = (held.head(x, 0, head // group) for x in (held.keys, held.values, held.log_weights))
        for j in range(q):
            sees = len(k) - (q - 1 - j)
            k1 = torch.cat([k[:sees], torch.zeros(1, 8)])
            v1, l1 = torch.cat([v[:sees], torch.zeros(1, width)]), torch.cat([l[:sees], sinks[head : head + 1]])
            want = reference.attention(queries[0, head, j], k1, v1, l1, 0.35)
            torch.testing.assert_close(got[0, head, j].double(), want, **NEAR)


def test_learned_sinks_take_their_share_after_an_eviction(generator):
    """A budget of 96 of 97 entries drops one; a sink of a large logit leaves nothing of any of them."""
    for logit in (-30.0, 1.0, 30.0):
        model, prompt, more = FAMILIES["gpt_oss"](), tokens(generator, 97), tokens(generator, 3)
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.data.fill_(logit)
        cache, stock = kvest.EvictionCache(model, "uniform/top_k/none@96"), DynamicCache(config=model.config)
        feed(model, cache, prompt), feed(model, stock, prompt)
        assert cache.report().evictions == [1]
        at_once = feed(model, stock, more)
        torch.testing.assert_close(feed(model, cache, more), at_once, rtol=0, atol=0.02 * float(at_once.abs().max()))


@pytest.mark.skipif(OLDER, reason="refused before transformers 5.24, as the next test shows")
def test_linear_layers_keep_their_stock_layer_and_go_with_the_rows(generator):
    """Reordered as beams, emptied and used again; taking tokens back is refused."""
    model, prompt, more = FAMILIES["lfm2"](), tokens(generator, 97, rows=2), tokens(generator, 5, rows=2)
    cache, fresh, swapped = (kvest.EvictionCache(model, POLICY) for _ in range(3))
    feed(model, cache, prompt), feed(model, swapped, prompt)
    assert [isinstance(layer, EvictionLayer) for layer in cache.layers] == [False, True, True]
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(feed(model, swapped, more.flip(0)), feed(model, cache, more).flip(0), **NEAR)
    with pytest.raises(ValueError, match=r"cannot take back 1 tokens: layer 0 \(LinearAttentionLayer\)"):
        cache.crop(-1)
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(ValueError, match=r"layer 0 \(LinearAttentionLayer\).*cannot repeat or select rows"):
            change()
    assert cache.report().seen.tolist() == [102, 102]
    cache.reset()
    for piece in (more, prompt):
        assert torch.equal(feed(model, cache, piece), feed(model, fresh, piece))


@pytest.mark.skipif(not OLDER, reason="evicted around from transformers 5.24 on, as the tests above show")
@pytest.mark.parametrize("name", RECURRENT)
def test_layers_with_a_recurrent_state_are_refused_by_older_releases(name):
    try:
        model = FAMILIES[name]()
    except ValueError:
        pytest.skip("this release knows no such layer types")
    with pytest.raises(kvest.UnsupportedModel, match=r"5\.24 on.*[uU]pgrade"):
        kvest.EvictionCache(model, POLICY)


def gpt_oss_without_eager():
    model = FAMILIES["gpt_oss"]()
    model.config._attn_implementation = "sdpa"
    return model


REFUSED = {
    "gemma2": (
        family("Gemma2", head_dim=8, sliding_window=16),
        r"Gemma2ForCausalLM: it caps attention logits \(softcap\).*stock cache",
    ),
    "gpt_oss under sdpa": (
        gpt_oss_without_eager,
        r"GptOssForCausalLM: it learns attention sinks, which 'sdpa'.*attn_implementation='eager'",
    ),
    "falcon_h1": (
        family("FalconH1", head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
        "FalconH1ForCausalLM: "
        + ("it keeps a state" if OLDER else "layer 0 keeps softmax attention and a recurrent state in one")
        + ".*stock cache",
    ),
    "gemma3n": (
        family("Gemma3n", config="Gemma3nTextConfig", **GEMMA3N),
        "Gemma3nForCausalLM: (it has layers that have|layer 3 has) no cache of (its|their) own.*stock cache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_right_is_refused_with_the_reason(name):
    make, message = REFUSED[name]
    with pytest.raises(kvest.UnsupportedModel, match=message):
        kvest.EvictionCache(make(), POLICY)
