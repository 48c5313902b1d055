"""The attention and mask functions that transformers calls instead of the model's own.

Both do nothing of their own for a stock cache, and for one of ours before its first eviction: the implementation that
the user had chosen computes attention, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvest.hf import compat
from kvest.hf.layer import ATTRIBUTE, EvictionLayer, MaskLength

_REFUSED = ("softcap", "position_bias")
"""Arguments that change the logits in ways that weighted attention does not reproduce."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    inner: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer: `inner` where nothing was evicted, weighted attention over what is held otherwise."""

    def exact() -> tuple[Tensor, Tensor | None]:
        function = compat.inner_attention(inner, module)
        out: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, *args, **kwargs)
        return out

    layer: EvictionLayer | None = getattr(key, ATTRIBUTE, None)
    return exact() if layer is None else _over_held(layer, module, query, exact, kwargs)


@compat.between_graphs
def _over_held(
    layer: EvictionLayer,
    module: nn.Module,
    query: Tensor,
    exact: Callable[[], tuple[Tensor, Tensor | None]],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention over what `layer` holds; then it is evicted, if that is due."""
    _own(layer, module, kwargs.get("s_aux"))
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"kvest's attention does not support {name!r}, which {type(module).__name__} passes")
    scale = kwargs.get("scaling")
    output = layer.attend(query, query.shape[-1] ** -0.5 if scale is None else float(scale), exact, kwargs.get("s_aux"))
    layer.session.after(layer)
    return output


def _own(layer: EvictionLayer, module: nn.Module, sinks: Tensor | None) -> None:
    """Raise where the layer is used with another model than the one its cache was made for, or sinks are kept back."""
    if layer.module is None:
        if sinks is None and compat.learned_sinks(module):
            raise ValueError(f"{type(module).__name__} learns attention sinks and does not pass them to its attention")
        model = layer.session.model()
        if model is not None and any(each is module for each in model.modules()):
            layer.module = weakref.ref(module)
    if layer.module is None or layer.module() is not module:
        raise ValueError(_OTHER_MODEL)


_OTHER_MODEL = "this cache was made for another model: make an EvictionCache for each model"


def mask(*args: Any, inner: str, **kwargs: Any) -> Any:
    """The mask of one layer type: the inner implementation's; none once the layers' storage is the mask."""
    length = kwargs.get("kv_length")
    if not isinstance(length, MaskLength):
        return compat.inner_mask(inner)(*args, **kwargs)
    return _mask_of_held(length, *args, inner=inner, **kwargs)


@compat.between_graphs
def _mask_of_held(length: MaskLength, *args: Any, inner: str, **kwargs: Any) -> Any:
    """A pass of the cache that gave `length` starts here; its mask, if it needs one."""
    if kwargs.get("config", length.session.config) is not length.session.config:
        raise ValueError(_OTHER_MODEL)
    tokens = int(length) - length.columns
    length.session.begin(kwargs.get("attention_mask"), kwargs["batch_size"], tokens, length.columns)
    if length.session.evicted:
        return None
    kwargs["kv_length"] = int(length)
    return compat.inner_mask(inner)(*args, **kwargs)
