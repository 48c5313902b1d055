"""By what a cache file knows its model again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvest.hf.compat import text_config

_VOLATILE = {
    *("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype"),
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation", "output_attentions"),
    "distributed_config",
}
"""Parts of a config that do not change what a model computes."""


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Its name, a fingerprint of its config, and one of its weights (None where some are not in memory)."""
    name = model.config._name_or_path
    config = {k: v for k, v in text_config(model).to_dict().items() if k not in _VOLATILE}
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "model": f"{type(model).__name__}{f' ({name})' if name else ''}",
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "weights": _weights(model),
    }


def _weights(model: PreTrainedModel) -> str | None:
    """A checksum of a few numbers of every weight: two models of one architecture differ in them."""
    samples = weight_samples(model)
    return None if samples is None else hashlib.sha256(samples.numpy().tobytes()).hexdigest()


@torch.no_grad()
def weight_samples(model: PreTrainedModel) -> Float[Tensor, "n"] | None:
    """Some numbers of every weight, at most eight, in float32; None where some are not in memory, or not whole."""
    samples = []
    for parameter in model.parameters():
        if parameter.device.type == "meta" or hasattr(parameter, "placements"):
            return None
        flat = parameter.reshape(-1)
        samples.append(flat[:: max(1, len(flat) // 8)][:8].float().cpu())
    return torch.cat(samples)
