"""Where kvest meets transformers: the only package that imports it."""

from kvest.hf.cache import EvictionCache
from kvest.hf.compat import UnsupportedModel, detach
from kvest.hf.report import Report

__all__ = ["EvictionCache", "Report", "UnsupportedModel", "detach"]
