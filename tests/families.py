"""One tiny random model of each family, in float32: `FAMILIES[name]()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_tools import sharpen
from kvest.hf.compat import OLDER

BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention", "full_attention"]


def family(name: str, **options: Any) -> Callable[[], PreTrainedModel]:
    """`name`'s causal language model of `BASE` and `options`; without an option whose value is `...`."""

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        chosen = {key: value for key, value in {**BASE, **options}.items() if value is not ...}
        config = getattr(transformers, options.get("config", f"{name}Config"))
        chosen.pop("config", None)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**chosen)).eval().float()
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.data.uniform_(-1.0, 3.0)
        return sharpen(model, 2.0)

    return make


FAMILIES = {
    "llama": family("Llama"),
    "mistral": family("Mistral", sliding_window=None),
    "ministral, sliding": family("Ministral", sliding_window=16, layer_types=MIXED, head_dim=8),
    "qwen2": family("Qwen2"),
    "qwen3": family("Qwen3", head_dim=8),
    "gemma3": family(
        "Gemma3", config="Gemma3TextConfig", head_dim=8, query_pre_attn_scalar=8, sliding_window=16, layer_types=MIXED
    ),
    "phi3": family("Phi3"),
    "gpt_oss": family("GptOss", head_dim=8, sliding_window=16, layer_types=MIXED, num_local_experts=4, **EXPERTS),
    "mixtral": family("Mixtral", num_local_experts=4, **EXPERTS),
    "qwen3_moe": family("Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=16, **EXPERTS),
    "cohere": family("Cohere"),
    "granite": family("Granite", attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0),
    "gpt_neox": family("GPTNeoX", num_key_value_heads=...),
    "phi": family("Phi"),
    "lfm2": family("Lfm2", layer_types=["conv", "full_attention", "full_attention"]),
    "qwen3_next": family(
        "Qwen3Next",
        head_dim=8,
        layer_types=LINEAR,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **EXPERTS,
    ),
    "granitemoehybrid": family(
        "GraniteMoeHybrid",
        layer_types=LINEAR,
        num_local_experts=4,
        shared_intermediate_size=16,
        mamba_n_heads=12,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_chunk_size=16,
        **EXPERTS,
    ),
}

RECURRENT = ("lfm2", "qwen3_next", "granitemoehybrid")
"""Hybrids with linear layers."""


def named(*names: str) -> list[Any]:
    """Test parameters: these families, but for those that this release of transformers cannot serve."""
    reason = "layers with a recurrent state are evicted around from transformers 5.24 on"
    skip = pytest.mark.skipif(OLDER, reason=reason)
    return [pytest.param(name, marks=skip) if name in RECURRENT else name for name in names]
