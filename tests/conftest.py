"""One torch thread, one generator per test, and a model small enough to build in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20250131)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(heads=6, kv_heads=2)`: a random llama of 3 layers in float32, made anew at each call."""

    def make(*, heads: int = 6, kv_heads: int = 2, layers: int = 3, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=101,
            hidden_size=8 * heads,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            attention_bias=True,
        )
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():  # the default initialisation attends almost uniformly
            parameter.data.mul_(4.0) if parameter.ndim == 2 else None
        for each in model.model.layers:  # what all queries of a head look for: some heads are peaked, some flat
            bias = each.self_attn.q_proj.bias.data
            bias.normal_().mul_(torch.linspace(1.0, 12.0, len(bias)))
        return model

    return make
