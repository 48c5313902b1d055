"""Where nothing is evicted, nothing differs: logits are the stock implementation's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvest
from hf_tools import POLICIES, feed, singly, tokens

WHOLE = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@1.0"


def run(model, cache, prompt, question):
    """Prefill, a question of several tokens, three decode steps."""
    return torch.cat(
        [feed(model, cache, prompt), feed(model, cache, question), singly(model, cache, question[:, :3])], dim=1
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keep_1_equals_the_implementation_the_model_had(tiny_model, generator, implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    prompt, question = tokens(generator, 97, rows=3), tokens(generator, 13, rows=3)
    want = run(model, DynamicCache(config=model.config), prompt, question)
    cache = kvest.EvictionCache(model, WHOLE)
    assert torch.equal(run(model, cache, prompt, question), want)
    assert cache.report().kept_whole
    assert cache.report().kept.unique().tolist() == [97 + 13 + 3]


def test_keep_1_equals_stock_in_a_left_padded_batch(tiny_model, generator):
    model = tiny_model()
    ids = tokens(generator, 97, rows=2)
    mask = torch.ones(2, 97 + 5, dtype=torch.long)
    mask[1, :31] = 0
    question = tokens(generator, 5, rows=2)
    logits = []
    for cache in (DynamicCache(config=model.config), kvest.EvictionCache(model, WHOLE)):
        logits.append(feed(model, cache, ids, mask[:, :97]))
        logits.append(singly(model, cache, question, mask))
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_with_a_cache_of_ours_serves_stock_caches_as_before(tiny_model, generator, implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    prompt, question = tokens(generator, 97), tokens(generator, 13)
    want = run(model, DynamicCache(config=model.config), prompt, question)
    want_without = model(prompt, use_cache=False).logits
    ours = kvest.EvictionCache(model, "uniform/systematic/inclusion@0.3")
    run(model, ours, prompt, question)
    assert torch.equal(run(model, DynamicCache(config=model.config), prompt, question), want)
    assert torch.equal(model(prompt, use_cache=False).logits, want_without)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_prompts_own_pass_is_exact_whatever_the_policy(tiny_model, generator, policy, padded):
    model = tiny_model()
    prompt = tokens(generator, 211, rows=2)
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :53] = 0
    want = feed(model, DynamicCache(config=model.config), prompt, mask)
    cache = kvest.EvictionCache(model, policy)
    assert torch.equal(feed(model, cache, prompt, mask), want)
    assert cache.report().evictions == [1, 1]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_detach_gives_back_the_old_name(tiny_model, implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    kvest.EvictionCache(model, WHOLE)
    kvest.EvictionCache(model, WHOLE)
    assert model.config._attn_implementation == f"kvest_{implementation}"
    kvest.detach(model)
    assert model.config._attn_implementation == implementation
    kvest.detach(model)
    assert model.config._attn_implementation == implementation


def test_the_only_thing_set_on_a_model_is_the_name_of_its_attention(tiny_model, generator):
    def state(model):
        """Everything on every module and the config, tensors by their version too."""
        found = {}
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                found[name, key] = id(value) if not isinstance(value, dict) else [(k, id(v)) for k, v in value.items()]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found[name, "version"] = tensor._version
        return found, {key: value for key, value in vars(model.config).items() if "attn_implementation" not in key}

    model = tiny_model()
    before = state(model)
    cache = kvest.EvictionCache(model, "uniform/systematic/inclusion@0.3, every=8")
    run(model, cache, tokens(generator, 97), tokens(generator, 13))
    assert cache.report().evictions == [2]
    assert state(model) == before
