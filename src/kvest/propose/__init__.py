"""Proposals: how much does each entry matter?  `Observation -> Proposal`. One method a file, one line here."""

from kvest.propose._base import Propose
from kvest.propose.capkv import CapKV
from kvest.propose.chunked import Chunked
from kvest.propose.critical import Critical
from kvest.propose.defensive import Defensive
from kvest.propose.h2o import H2O
from kvest.propose.harmonic import Harmonic
from kvest.propose.key_norm import KeyNorm
from kvest.propose.keydiff import KeyDiff
from kvest.propose.kvzip import KVzip
from kvest.propose.last_query import LastQuery
from kvest.propose.mixed import Mixed
from kvest.propose.output_error import OutputError
from kvest.propose.sharp import Sharp
from kvest.propose.snapkv import SnapKV
from kvest.propose.streaming import Streaming
from kvest.propose.uniform import Uniform
from kvest.propose.with_certain import WithCertain

__all__ = [
    "H2O",
    "PROPOSALS",
    "CapKV",
    "Chunked",
    "Critical",
    "Defensive",
    "Harmonic",
    "KeyDiff",
    "KVzip",
    "KeyNorm",
    "LastQuery",
    "Mixed",
    "OutputError",
    "Propose",
    "Sharp",
    "SnapKV",
    "Streaming",
    "Uniform",
    "WithCertain",
]

PROPOSALS: dict[str, type[Propose]] = {
    "uniform": Uniform,
    "streaming": Streaming,
    "key_norm": KeyNorm,
    "keydiff": KeyDiff,
    "last_query": LastQuery,
    "snapkv": SnapKV,
    "h2o": H2O,
    "harmonic": Harmonic,
    "output_error": OutputError,
    "capkv": CapKV,
    "kvzip": KVzip,
    "mixed": Mixed,
    "with_certain": WithCertain,
    "sharp": Sharp,
    "chunked": Chunked,
    "defensive": Defensive,
    "critical": Critical,
}
"""Name in a policy -> method. Wrappers take a proposal as their first argument."""
