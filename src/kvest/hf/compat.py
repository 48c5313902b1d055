"""All that differs between releases of transformers, and all that kvest must know about a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from jaxtyping import Float, Int
from packaging import version
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvest.types import Rotation

PREFIX = "kvest_"
"""An attached model's attention implementation is this and the name of the one it had, e.g. `kvest_sdpa`."""


RELEASE = version.parse(transformers.__version__)
OLDER = (RELEASE.major, RELEASE.minor) < (5, 24)
"""Older releases differ in which layers have which cache: some give a linear layer that of a full one, others read
several tokens into a recurrent state as if they were the first."""

CACHE_ARGUMENT = "past_key_values" if OLDER else "cache"
"""What a model's forward and generate call their cache."""

CROP_KEEPS = "max_length" in inspect.signature(DynamicLayer.crop).parameters
"""Whether a positive argument of `crop` is the number of tokens to keep (until 5.10 or later), not an error."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def between_graphs(function: _Function) -> _Function:
    """`function`, left alone by torch.compile: a compiled step is interrupted there, once for all tokens."""
    reason = (
        "what a kvest.EvictionCache holds grows with every token, and no single graph can hold it: leave out "
        "fullgraph=True (the rest of the model is still compiled)"
    )
    alone: _Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]  # of torch
    return alone


class UnsupportedModel(ValueError):
    """A model whose cache kvest cannot evict rightly: names the model, the reason and the way out."""

    def __init__(self, model: PreTrainedModel, reason: str, way_out: str) -> None:
        super().__init__(f"kvest cannot evict the cache of {type(model).__name__}: {reason}. {way_out}")


def text_config(model: PreTrainedModel) -> Any:
    """The config of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def check(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel where eviction could not be right."""
    config = text_config(model)
    stock = "Use the stock cache for it"
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(model, "it is an encoder-decoder with a cache of its own", stock)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModel(
            model, "its latent attention (MLA) has no keys per head that could be kept or dropped", stock
        )
    declares = getattr(model, "_supports_attention_backend", False)
    dispatches = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")  # hybrids do, undeclared
    if not (declares or (dispatches and getattr(model, "_is_stateful", False))):
        raise UnsupportedModel(
            model, "its attention cannot be exchanged through transformers' AttentionInterface", stock
        )
    if OLDER and (getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache()):
        raise UnsupportedModel(
            model, f"it keeps a state, which kvest leaves alone from 5.24 on, not in {RELEASE}", f"{stock}, or upgrade"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModel(model, "it caps attention logits (softcap), which kvest does not do yet", stock)
    name = (model.config._attn_implementation or "sdpa").removeprefix(PREFIX)
    if name not in ("eager", "flex_attention") and any(learned_sinks(module) for module in model.modules()):
        raise UnsupportedModel(
            model,
            f"it learns attention sinks, which {name!r} attention may leave out",
            "Load it with attn_implementation='eager', or use the stock cache",
        )


def learned_sinks(module: nn.Module) -> bool:
    """Whether an attention module has a learned logit per query head that takes part in each softmax."""
    return isinstance(getattr(module, "sinks", None), nn.Parameter)


def stock_layers(model: PreTrainedModel) -> tuple[list[Any], list[int]]:
    """(the layers of a stock cache, indices of those that grow without bound and can be evicted)."""
    layers = DynamicCache(config=model.config).layers
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if OLDER and (kinds or len(layers) < config.num_hidden_layers):
        what = f"layers of {', '.join(sorted(kinds))}" if kinds else "layers that have no cache of their own"
        raise UnsupportedModel(
            model,
            f"it has {what}, which kvest tells apart from 5.24 on, not in {RELEASE}",
            "Upgrade, or use the stock cache",
        )
    evictable = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    for i, layer in enumerate(layers):
        bounded = isinstance(layer, DynamicSlidingWindowLayer) or not isinstance(layer, DynamicLayer)
        kind = type(layer).__name__
        if kind == "DummyLayer":
            reason = f"layer {i} has no cache of its own (it reads another layer's, or has no attention)"
        elif "LinearAttentionAnd" in kind:
            reason = f"layer {i} keeps softmax attention and a recurrent state in one cache layer ({kind})"
        elif i in evictable or bounded:
            continue
        else:
            reason = f"layer {i} keeps its cache in a {kind}, which kvest does not know"
        raise UnsupportedModel(model, reason, "Use the stock cache")
    if not evictable:
        raise UnsupportedModel(
            model,
            "every layer is bounded already (sliding window or linear attention)",
            "The stock cache will not grow",
        )
    return layers, evictable


def attach(model: PreTrainedModel, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Name kvest's attention, wrapped around the implementation the model had, as the model's."""
    name = model.config._attn_implementation or "sdpa"
    if name.startswith(PREFIX):
        return
    if "flash" in name or "/" in name:
        raise UnsupportedModel(
            model,
            f"its attention implementation {name!r} looks itself up by its name, and kvest cannot stand in front of it",
            "Load the model with attn_implementation='sdpa'",
        )
    ours = PREFIX + name
    AttentionInterface.register(ours, _Wrapped(attention, name))
    AttentionMaskInterface.register(ours, _Wrapped(mask, name))
    model.set_attn_implementation(ours)
    if model.config._attn_implementation != ours:
        raise UnsupportedModel(model, "it refuses to change its attention implementation", "Use the stock cache")


def detach(model: PreTrainedModel) -> None:
    """Give the model back the attention implementation that it had before its first `EvictionCache`.

    Its caches cannot be used any more; a new `EvictionCache` attaches it again.
    """
    name = model.config._attn_implementation or ""
    if name.startswith(PREFIX):
        model.set_attn_implementation(name.removeprefix(PREFIX))


class _Wrapped:
    """A function that is told which implementation it stands in front of."""

    def __init__(self, function: Callable[..., Any], inner: str) -> None:
        self.function, self.inner = function, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, inner=self.inner, **kwargs)


def inner_attention(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function called `name`; eager ones live beside the model."""
    if name == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009  # a module
    return ALL_ATTENTION_FUNCTIONS[name]


def inner_mask(name: str) -> Callable[..., Any]:
    """The mask function of the attention implementation called `name`."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def query_length(argument: int | Tensor) -> int:
    """`get_mask_sizes` is given the number of queries, or (up to 5.0) their cache positions."""
    return argument.shape[0] if isinstance(argument, Tensor) else argument


def rotation(model: PreTrainedModel) -> Rotation | None:
    """Positions -> (cos, sin) of the model's rotary embedding; None where it has none of the common kind."""
    modules = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if not modules:
        return None
    config = text_config(model)
    rotate_half = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    probe = torch.arange(1.0, 5.0)
    if getattr(config, "no_rope_layers", None) or rotate_half is None:
        return None
    if rotate_half(probe).tolist() != [-3.0, -4.0, 1.0, 2.0]:  # interleaved pairs, as in cohere
        return None
    embedding = modules[0]
    layered = hasattr(embedding, "layer_types")

    def rotate(positions: Int[Tensor, "n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        kwargs = {"layer_type": "full_attention"} if layered else {}
        cos, sin = embedding(like, positions[None], **kwargs)
        return cos[0].to(positions.device), sin[0].to(positions.device)

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Where weights are offloaded, the model's own device is meta.
    device = next((buffer.device for buffer in embedding.buffers() if not buffer.is_meta), torch.device("cpu"))
    if rotate(torch.zeros(1, dtype=torch.int64, device=device))[0].shape[-1] != width:
        return None  # a partial rotation
    return rotate
