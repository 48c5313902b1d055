"""What cannot be done right raises an error that repeats the input, names the reason and the way out."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvest
from hf_tools import feed, hybrid, tokens
from kvest.hf.compat import CROP_KEEPS

POLICY = "h2o/systematic/inclusion@0.25"
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def t5():
    config = transformers.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=16))


def deepseek():
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **ranks, first_k_dense_replace=2)
    return transformers.DeepseekV3ForCausalLM(config)


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=16))


def bloom():
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (t5, "T5ForConditionalGeneration", "encoder-decoder"),
        (gemma2, "Gemma2ForCausalLM", "softcap"),
        (deepseek, "DeepseekV3ForCausalLM", "MLA"),
        (mistral, "MistralForCausalLM", "bounded already"),
        (bloom, "BloomForCausalLM", "cannot be exchanged"),
    ],
)
def test_an_unsupported_model_is_named_with_the_reason_and_left_alone(make, name, reason):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(kvest.UnsupportedModel, match=rf"{name}: .*{reason}.*[Ss]tock cache"):
        kvest.EvictionCache(model, POLICY)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_cache_of_another_model_is_refused(tiny_model, generator, attached, when):
    owner, other = tiny_model(), tiny_model(seed=1)
    cache = kvest.EvictionCache(owner, POLICY)
    if attached:
        kvest.EvictionCache(other, POLICY)
    if when == "later":
        feed(owner, cache, tokens(generator, 37))
    with pytest.raises((ValueError, RuntimeError), match="made for another model"):
        feed(other, cache, tokens(generator, 37))


def test_a_model_that_shares_its_config_is_another_model_still(tiny_model, generator):
    owner = tiny_model()
    other = transformers.LlamaForCausalLM(owner.config).eval()
    cache = kvest.EvictionCache(owner, POLICY)
    other.set_attn_implementation(owner.config._attn_implementation)
    with pytest.raises(ValueError, match="made for another model"):
        feed(other, cache, tokens(generator, 37))


def test_a_cache_of_a_detached_model_is_refused(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    feed(model, cache, tokens(generator, 37))
    kvest.detach(model)
    with pytest.raises(RuntimeError, match="implementation was changed"):
        feed(model, cache, tokens(generator, 3))


@pytest.mark.parametrize("seen", [0, 37])
def test_a_4d_mask_is_refused(tiny_model, generator, seen):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    if seen:
        feed(model, cache, tokens(generator, seen))
    mask = torch.zeros(1, 1, 5, seen + 5)
    with pytest.raises(RuntimeError, match=r"4D attention mask.*2D"):
        model(tokens(generator, 5), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("length", [3, 36, 39, 41])
def test_a_mask_of_a_wrong_length_is_refused(tiny_model, generator, length):
    """3: only the new tokens, the usual mistake. It must cover all that was seen, evicted or not."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    feed(model, cache, tokens(generator, 37))
    mask = torch.ones(1, length, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"covers {length} tokens.*seen 37\s+and 3 are new.*all 40"):
        model(tokens(generator, 3), attention_mask=mask, past_key_values=cache)


def test_another_number_of_rows_is_refused(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    feed(model, cache, tokens(generator, 37, rows=2))
    with pytest.raises(ValueError, match=r"holds 2 rows, and the input has 3.*one cache per batch"):
        feed(model, cache, tokens(generator, 3, rows=3))


def test_a_row_of_only_padding_is_refused(tiny_model, generator):
    model = tiny_model()
    mask = torch.ones(3, 37, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1 of the prompt has no token"):
        feed(model, kvest.EvictionCache(model, POLICY), tokens(generator, 37, rows=3), mask)


def test_budgets_too_small_for_sinks_and_window_are_refused(tiny_model, generator):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"19 entries per head cannot hold 4 sinks and a window of\s+16.*at least 20"):
        kvest.EvictionCache(model, "h2o/systematic/inclusion@19")
    kvest.EvictionCache(model, "h2o/systematic/inclusion@20")
    with pytest.raises(ValueError, match=r"10 entries.*7 sinks.*at least 12"):
        kvest.EvictionCache(model, "h2o/systematic/inclusion@10, sinks=7, window=5")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_budget_of_bytes_below_the_least_possible_is_refused_and_the_least_works(tiny_model, generator, rows):
    """Fault 13: 72 bytes for each of 20 entries in 6 heads."""
    least = 72 * 20 * 6 * rows
    model, prompt = tiny_model(), tokens(generator, 37, rows=rows)
    with pytest.raises(ValueError, match=f"{least - 1}B cannot hold.*least possible is {least} bytes"):
        feed(model, kvest.EvictionCache(model, f"h2o/top_k/none@{least - 1}B"), prompt)
    cache = kvest.EvictionCache(model, f"h2o/top_k/none@{least}B")
    feed(model, cache, prompt)
    assert cache.report().kept_bytes == least


def test_the_least_possible_counts_the_layers_that_are_not_evicted(generator):
    model = hybrid()
    with pytest.raises(ValueError, match=rf"least possible is {72 * 20 * 4 + 4 * 16 * 128} bytes.*{4 * 16 * 128} of"):
        feed(model, kvest.EvictionCache(model, "h2o/top_k/none@8KiB"), tokens(generator, 37))


def test_crop_takes_back_the_tail_and_no_more(tiny_model, generator):
    model = tiny_model()
    cache, never = (kvest.EvictionCache(model, POLICY) for _ in range(2))
    prompt, kept, dropped = tokens(generator, 97), tokens(generator, 5), tokens(generator, 8)
    feed(model, never, prompt), feed(model, never, kept)
    feed(model, cache, prompt), feed(model, cache, kept), feed(model, cache, dropped)
    cache.crop(-8)
    assert cache.report().kept_bytes >= never.report().kept_bytes
    assert cache.get_seq_length() == 102
    torch.testing.assert_close(feed(model, cache, dropped), feed(model, never, dropped), rtol=1e-5, atol=1e-5)
    cache.crop(-13)
    with pytest.raises(ValueError, match=r"cannot take back 1 tokens: only the 0.*[Aa]ssisted decoding"):
        cache.crop(-1)
    if CROP_KEEPS:
        cache.crop(98)  # leave 98: there are no more
        with pytest.raises(ValueError, match=r"cannot take back 94 tokens"):
            cache.crop(3)
    else:
        with pytest.raises(ValueError, match=r"negative number.*not 3"):
            cache.crop(3)
    assert cache.get_seq_length() == 97


def test_an_error_in_a_pass_leaves_the_model_usable(tiny_model, generator):
    model = tiny_model()
    want = feed(model, None, tokens(torch.Generator().manual_seed(1), 37))
    with pytest.raises(ValueError, match="covers"):
        model(tokens(generator, 5), attention_mask=torch.ones(1, 3), past_key_values=kvest.EvictionCache(model, POLICY))
    assert torch.equal(feed(model, None, tokens(torch.Generator().manual_seed(1), 37)), want)
