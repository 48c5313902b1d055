"""Undoing the rotary embedding: exactly, for every kind that a model can have."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import kvest
from hf_tools import feed, tokens
from kvest.hf import compat
from kvest.rotary import Rotation

SMALL = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}

SCALED = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def llama(scaling: dict | None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given = {} if scaling is None else {"rope_scaling": {**scaling, "rope_theta": 10000.0}}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, max_position_embeddings=64, **given)).eval()


GLM = {**SMALL, **HEADS, "head_dim": 16, "partial_rotary_factor": 0.5}
MODELS = {
    **{name: lambda scaling=scaling: llama(scaling) for name, scaling in SCALED.items()},
    "partial": lambda: PhiForCausalLM(PhiConfig(**SMALL, num_attention_heads=3)).eval(),
    "interleaved": lambda: CohereForCausalLM(CohereConfig(**SMALL, **HEADS)).eval(),
    "interleaved-partial": lambda: GlmForCausalLM(GlmConfig(**GLM)).eval(),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_keys_turned_back_are_what_the_projection_gave(make, generator):
    """Of a prompt of 83 tokens, beyond the trained 64 of the scaled llamas: where dynamic scaling has set in."""
    model = make()
    projected = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(lambda *args, i=i: projected.__setitem__(i, args[2]))
    cache = kvest.EvictionCache(model, "keydiff/top_k/none@1.0")
    feed(model, cache, tokens(generator, 83))
    for i, rotation in enumerate(compat.rotations(model)):
        keys = cache.layers[i].keys
        before = projected[i].view(1, 83, keys.shape[1], -1).transpose(1, 2)
        positions = torch.arange(83)
        assert (before - keys).abs().max() > 0.01
        torch.testing.assert_close(rotation.undo(keys, positions), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rotation.undone_sum(keys, positions), before.sum(2), rtol=1e-4, atol=1e-4)
        cos, sin = rotation.at(positions)
        torch.testing.assert_close(rotation.turn(before, cos, sin), keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_looking_ahead_changes_nothing_about_the_model(scaling, generator):
    """Dynamic scaling changes the model's frequencies when it is asked for later positions; scoring does not ask it."""
    model = llama(scaling)
    prompt, more = tokens(generator, 61), tokens(generator, 5)
    plain, ahead = (kvest.EvictionCache(model, f"{p}/top_k/none@1.0") for p in ("keydiff", "capkv"))
    feed(model, plain, prompt)
    want = feed(model, plain, more)
    evicted = kvest.EvictionCache(model, "capkv/top_k/none@0.5")
    feed(model, ahead, prompt), feed(model, evicted, prompt)
    assert torch.equal(feed(model, ahead, more), want)


def test_a_model_without_rotation_needs_nothing(generator):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=3)).eval()
    x = torch.randn(3, 7, 16, generator=generator)
    for rotation in compat.rotations(model):
        assert torch.equal(rotation.undo(x, torch.arange(7)), x)
        torch.testing.assert_close(rotation.turn(x[:, 0], *rotation.ahead(7, 5, x.device)), x[:, 0])
    cache = kvest.EvictionCache(model, "capkv/top_k/none@0.5")
    feed(model, cache, tokens(generator, 83))
    assert cache.report().kept.unique().tolist() == [41]


def test_layers_that_turn_nothing_are_left_alone():
    """SmolLM3 turns nothing in every fourth layer."""
    module = importlib.import_module("transformers.models.smollm3")
    config = module.SmolLM3Config(
        **{**SMALL, "num_hidden_layers": 4}, **HEADS, max_position_embeddings=64, use_sliding_window=False
    )
    found = compat.rotations(module.SmolLM3ForCausalLM(config).eval())
    widths = [2 * len(rotation.frequencies()[0]) for rotation in found]
    assert widths == [16, 16, 16, 0]


def test_an_unknown_rotation_is_refused_by_name(tiny_model):
    model = tiny_model()
    model.model.rotary_emb.forward = lambda x, positions: (x, x)
    with pytest.raises(kvest.UnsupportedModel, match="rotary embedding"):
        kvest.EvictionCache(model, "capkv/top_k/none@0.5")
    kvest.EvictionCache(model, "capkv(form=paper)/top_k/none@0.5")


@pytest.mark.parametrize("interleaved", [False, True])
def test_components_are_turned_in_pairs(interleaved):
    """By hand: one pair of frequency 0.5, at position 3, in a width of 6 of which 4 are turned; factor 2."""
    rotation = Rotation(lambda: (torch.tensor([0.5, 0.25]), 2.0), interleaved)
    cos, sin = rotation.at(torch.tensor([3]))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    a, b = (1, 2) if interleaved else (1, 3)
    angle = torch.tensor(1.5)
    want = 2 * (a * angle.cos() - b * angle.sin()), 2 * (b * angle.cos() + a * angle.sin())
    got = rotation.turn(x, cos, sin)[0]
    torch.testing.assert_close(torch.stack([got[0], got[1 if interleaved else 2]]), torch.stack(want))
    assert got[4:].tolist() == [5.0, 6.0]
    torch.testing.assert_close(rotation.undo(got[None], torch.tensor([3])), x)
