"""Where kvest meets transformers: the only package that imports it."""

from kvest.hf.cache import EvictionCache
from kvest.hf.compat import UnsupportedModel, detach
from kvest.hf.report import Report
from kvest.hf.storage import CacheFileError, CacheHeader, cache_header

__all__ = ["CacheFileError", "CacheHeader", "EvictionCache", "Report", "UnsupportedModel", "cache_header", "detach"]
