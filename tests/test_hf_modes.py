"""Gradients, inference mode and autocast; passes that fail; models whose projections share storage."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

import kvest
from hf_tools import feed, hybrid, tokens
from kvest.policy import Policy

POLICY = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.3"


def test_a_forward_with_gradients_evicts_and_keeps_no_graph(tiny_model, generator):
    model = tiny_model()
    ids, follow = tokens(generator, 61), tokens(generator, 7)
    cache = kvest.EvictionCache(model, POLICY)
    with torch.enable_grad():
        model(ids, past_key_values=cache)
        got = model(follow, past_key_values=cache).logits
    again = kvest.EvictionCache(model, POLICY)
    feed(model, again, ids)
    torch.testing.assert_close(got.detach(), feed(model, again, follow))
    copy.deepcopy(cache)  # refuses tensors that belong to a graph
    assert not any(layer.store.keys.requires_grad for layer in cache.layers)


def test_a_cache_goes_on_outside_the_inference_mode_it_was_filled_in(tiny_model, generator):
    model = tiny_model()
    ids, follow = tokens(generator, 61), tokens(generator, 7)
    cache, other = (kvest.EvictionCache(model, POLICY) for _ in range(2))
    with torch.inference_mode():
        feed(model, cache, ids)
        feed(model, cache, follow[:, :3])
    feed(model, other, ids)
    feed(model, other, follow[:, :3])
    with torch.no_grad():
        torch.testing.assert_close(feed(model, cache, follow[:, 3:]), feed(model, other, follow[:, 3:]))


def test_autocast_follows_up_on_a_cache_of_another_dtype(tiny_model, generator):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    feed(model, cache, tokens(generator, 61))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens(generator, 5), past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    assert cache.layers[0].store.keys.dtype == torch.float32


def test_after_a_pass_that_failed_the_cache_refuses_and_can_be_reset(tiny_model, generator):
    """NaN scores in the last layer stop the pass when the other layers have seen the prompt already."""
    model = tiny_model()
    ids = tokens(generator, 61)
    weight = model.model.layers[-1].self_attn.v_proj.weight
    whole = weight.detach().clone()
    cache = kvest.EvictionCache(model, POLICY)
    weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite scores"):
        feed(model, cache, ids)
    weight.data.copy_(whole)
    with pytest.raises(RuntimeError, match="earlier pass over this cache did not finish"):
        feed(model, cache, ids)
    cache.reset()
    fresh = kvest.EvictionCache(model, POLICY)
    assert torch.equal(feed(model, cache, ids), feed(model, fresh, ids))
    assert cache.report().seen.tolist() == [61]


@pytest.mark.parametrize(
    "sentence", ["with_certain(uniform, by=key_norm)/systematic/inclusion@0.5", "capkv/top_k/none@0.5"]
)
def test_nan_in_any_score_is_reported(tiny_model, generator, sentence):
    model = tiny_model()
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite scores"):
        feed(model, kvest.EvictionCache(model, sentence), tokens(generator, 61))


def test_crop_beyond_a_sliding_window_changes_nothing(generator):
    model = hybrid()
    cache = kvest.EvictionCache(model, "keydiff/top_k/none@0.5")
    feed(model, cache, tokens(generator, 50))
    follow = tokens(generator, 4)
    feed(model, cache, follow)
    untouched = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="has let go of"):
        cache.crop(-2)
    assert cache.get_seq_length() == 54
    assert torch.equal(feed(model, cache, follow), feed(model, untouched, follow))


def test_layers_that_wait_for_each_other_do_not_hold_the_prompts_queries(tiny_model, generator, monkeypatch):
    """Under one threshold all layers wait for the last one: what they hold meanwhile is keys, values and scores."""
    model = tiny_model()
    held = []
    cache = kvest.EvictionCache(model, POLICY)
    keep = Policy.keep

    def look(policy, observation, *rest):
        held.append(observation.queries.untyped_storage().nbytes())
        return keep(policy, observation, *rest)

    monkeypatch.setattr(Policy, "keep", look)
    feed(model, cache, tokens(generator, 61))
    assert held == [0, 0, 0]


def test_the_prompt_is_freed_layer_by_layer(tiny_model, generator, monkeypatch):
    """Under one threshold as well: when a layer's entries are copied, all before it hold what they keep alone."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    propose, keep = Policy.proposal, Policy.keep
    whole, freed = [], []

    def first(policy, observation):
        whole.append(weakref.ref(observation.keys))
        return propose(policy, observation)

    def then(policy, *rest):
        gone = [keys() is None for keys in whole]
        assert gone == [layer.keys is None for layer in cache.layers]
        freed.append(gone)
        return keep(policy, *rest)

    monkeypatch.setattr(Policy, "proposal", first)
    monkeypatch.setattr(Policy, "keep", then)
    feed(model, cache, tokens(generator, 61))
    assert freed == [[False] * 3, [True, False, False], [True, True, False]]


@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_fused_projections_are_not_kept_alive_by_the_keys(kind, generator):
    torch.manual_seed(0)
    if kind == "phi3":
        config = Phi3Config(
            vocab_size=101, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        model = Phi3ForCausalLM(config).eval()
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=6)).eval()
    cache = kvest.EvictionCache(model, "keydiff/top_k/none@1.0")
    feed(model, cache, tokens(generator, 61))
    report = cache.report()
    assert report.kept_bytes == report.full_bytes


def test_flash_attention_is_refused_by_name(tiny_model):
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(kvest.UnsupportedModel, match="attn_implementation='sdpa'"):
        kvest.EvictionCache(model, POLICY)


def test_a_decode_step_makes_no_tensor_from_host_numbers(tiny_model, generator, monkeypatch):
    """Fault 18: On an accelerator each would be a copy that waits for the device."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICY)
    feed(model, cache, tokens(generator, 61))
    feed(model, cache, tokens(generator, 1))
    made = []
    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or plain(*args, **kwargs))
    feed(model, cache, tokens(generator, 1))
    assert made == []
    assert plain([1]).tolist() == [1]
