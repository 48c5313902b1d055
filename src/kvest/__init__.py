"""kvest evicts most of a transformer's KV cache and corrects for what it evicted.

    policy = kvest.Policy.parse("h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25")
    cache = kvest.EvictionCache(model, policy, seed=0)
    ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    print(cache.report())

Names are imported when they are first used, so that `import kvest` is quick and changes nothing anywhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvest.attend import attention
    from kvest.budget import Bytes, Entries, Fraction
    from kvest.grammar import PolicyError
    from kvest.hf import CacheFileError, EvictionCache, Report, UnsupportedModel, cache_header, detach
    from kvest.policy import Policy
    from kvest.types import Draw, Observation, Proposal, Retained

_HOME = {
    "attention": "kvest.attend",
    "Bytes": "kvest.budget",
    "cache_header": "kvest.hf",
    "CacheFileError": "kvest.hf",
    "Entries": "kvest.budget",
    "Fraction": "kvest.budget",
    "PolicyError": "kvest.grammar",
    "EvictionCache": "kvest.hf",
    "Report": "kvest.hf",
    "UnsupportedModel": "kvest.hf",
    "detach": "kvest.hf",
    "Policy": "kvest.policy",
    "Draw": "kvest.types",
    "Observation": "kvest.types",
    "Proposal": "kvest.types",
    "Retained": "kvest.types",
}

__all__ = [
    "attention",
    "Bytes",
    "cache_header",
    "CacheFileError",
    "detach",
    "Draw",
    "Entries",
    "EvictionCache",
    "Fraction",
    "Observation",
    "Policy",
    "PolicyError",
    "Proposal",
    "Report",
    "Retained",
    "UnsupportedModel",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvest' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
