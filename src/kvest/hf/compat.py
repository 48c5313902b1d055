"""All that differs between releases of transformers, and all that kvest must know about a model."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import transformers
from jaxtyping import Float
from packaging import version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvest.rotary import Rotation

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


class Normalizers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Listens to an attention function for `log sum exp` of each query's logits, which some kernels return unasked."""

    _KERNELS = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self._KERNELS:
            self._found.append(out[1])
        return out

    def of(self, queries: Float[Tensor, "b n q d"]) -> Float[Tensor, "b n q"] | None:
        """Those of these queries, if one kernel was called and told."""
        if len(self._found) != 1 or self._found[0].shape != queries.shape[:3]:
            return None
        return self._found[0].detach().float()


def query_length(argument: int | Tensor) -> int:
    """`get_mask_sizes` is given the number of queries, or (up to 5.0) their cache positions."""
    return argument.shape[0] if isinstance(argument, Tensor) else argument


_PLAIN_WHERE_FULL = ("cohere2", "exaone4")
"""Model types whose full attention layers turn nothing if there are sliding ones."""


def rotations(model: PreTrainedModel) -> list[Rotation | None]:
    """How each layer turns queries and keys; None where that is of no kind that can be undone."""
    config = text_config(model)
    layers = config.num_hidden_layers
    plain = Rotation(lambda: (torch.empty(0), 1.0))
    known = vars(config).keys() | vars(config.__class__).keys()
    if not any("rope" in name or "rotary" in name for name in known):
        return [plain] * layers  # learned positions, or none
    modules = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    turned = _rotation(model, modules[0]) if modules else None
    used = list(getattr(config, "no_rope_layers", None) or [1] * layers)  # 1 where it is used, whatever its name
    if config.model_type in _PLAIN_WHERE_FULL and getattr(config, "sliding_window", None):
        used = [kind != "full_attention" for kind in config.layer_types]
    return [turned if use else plain for use in used]


def _rotation(model: PreTrainedModel, embedding: nn.Module) -> Rotation | None:
    """Read off the model's own rotary embedding, if that computes what kvest thinks it does."""
    prefix = "full_attention_" if hasattr(embedding, "full_attention_inv_freq") else ""
    rotate_half = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    halves = None if rotate_half is None else rotate_half(torch.arange(1.0, 5.0)).tolist()
    if halves not in (_HALVES, _PAIRS) or not isinstance(getattr(embedding, f"{prefix}inv_freq", None), Tensor):
        return None

    def of(embedding: nn.Module) -> Rotation:
        def frequencies() -> tuple[Float[Tensor, "n"], float]:
            found: Tensor = getattr(embedding, f"{prefix}inv_freq")
            return found, float(getattr(embedding, f"{prefix}attention_scaling", 1.0))

        return Rotation(frequencies, interleaved=halves == _PAIRS)

    asked = copy.deepcopy(embedding)  # asking may change the frequencies
    positions = torch.arange(3, device=asked.get_buffer(f"{prefix}inv_freq").device)
    if positions.is_meta:
        return None
    kwargs = {"layer_type": "full_attention"} if prefix else {}
    theirs = asked(torch.empty(1, 1, device=positions.device), positions[None], **kwargs)
    ours = of(asked).at(positions)
    other = replace(of(asked), interleaved=False).at(positions)  # glm lays its pairs out later
    same = any(_close(each, theirs) for each in (ours, other))
    return of(embedding) if same else None


_HALVES, _PAIRS = [-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0]
"""What the two kinds of `rotate_half` make of 1, 2, 3, 4."""


def _close(ours: tuple[Tensor, Tensor], theirs: Any) -> bool:
    shapes = [a.shape == b[0].shape for a, b in zip(ours, theirs, strict=True)]
    return all(shapes) and all(torch.allclose(a, b[0], atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def output_module(module: nn.Module) -> nn.Module | None:
    """The linear module that an attention module's heads go through last, where it has one that kvest knows."""
    found = (getattr(module, name, None) for name in ("o_proj", "out_proj", "dense", "c_proj", "wo"))
    return next((each for each in found if isinstance(getattr(each, "weight", None), Tensor)), None)


def output_projection(module: nn.Module, queries: int, width: int) -> Float[Tensor, "hg m e"]:
    """The columns of an attention module's output projection that each of `queries` heads of `width` goes through.

    Raises ValueError where it has none that kvest knows.
    """
    linear = output_module(module)
    if linear is not None:
        weight = linear.weight
        assert isinstance(weight, Tensor)
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight = weight.T if type(linear).__name__ == "Conv1D" else weight
        if weight.ndim == 2 and weight.shape[1] == queries * width:
            return weight.detach().reshape(len(weight), queries, width).transpose(0, 1)
    raise ValueError(
        f"kvest found no output projection in {type(module).__name__}: take a proposal that does not look at it"
    )
