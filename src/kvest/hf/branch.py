"""Where a cache was, so that it can return there: many questions over one document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvest.hf.layer import EvictionLayer

if TYPE_CHECKING:
    from kvest.hf.cache import EvictionCache


class Mark:
    """The state of a cache. Of layers that are evicted it holds references, of bounded ones (small) copies."""

    def __init__(self, cache: EvictionCache) -> None:
        self.session = cache.session.state()
        self.layers = [_mark(layer) for layer in cache.layers]

    def check_crop(self, cache: EvictionCache, count: int) -> None:
        """Raise ValueError where this would take back tokens from before the branch."""
        since = cache.session.columns - self.session["columns"]
        if count > since:
            raise ValueError(
                f"cannot take back {count} tokens within a branch that has added {since}: crop before cache.branch()"
            )

    def back(self, cache: EvictionCache) -> None:
        """Return to this state."""
        cache.session.restore(self.session)
        for layer, mark in zip(cache.layers, self.layers, strict=True):
            if isinstance(layer, EvictionLayer):
                layer.back(mark)
            else:
                vars(layer).clear()
                vars(layer).update(mark)


def _mark(layer: Any) -> dict[str, Any]:
    if isinstance(layer, EvictionLayer):
        return layer.mark()
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(layer).items()}
