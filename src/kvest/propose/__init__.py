"""Proposals: how much does each entry matter?  `Observation -> Proposal`. One method a file, one line here."""

from kvest.propose._base import Propose
from kvest.propose.capkv import CapKV
from kvest.propose.capkv_greedy import CapKVGreedy
from kvest.propose.chunked import Chunked
from kvest.propose.compactor import Compactor
from kvest.propose.critical import Critical
from kvest.propose.curdkv import CurDKV
from kvest.propose.defensive import Defensive
from kvest.propose.expected_attention import ExpectedAttention
from kvest.propose.h2o import H2O
from kvest.propose.harmonic import Harmonic
from kvest.propose.key_norm import KeyNorm
from kvest.propose.keydiff import KeyDiff
from kvest.propose.kvzip import KVzip
from kvest.propose.lagkv import LagKV
from kvest.propose.last_query import LastQuery
from kvest.propose.lava import Lava
from kvest.propose.leverage import Leverage
from kvest.propose.mixed import Mixed
from kvest.propose.moment_residual import MomentResidual
from kvest.propose.noncausal import NonCausal
from kvest.propose.output_error import OutputError
from kvest.propose.sharp import Sharp
from kvest.propose.snapkv import SnapKV
from kvest.propose.streaming import Streaming
from kvest.propose.uniform import Uniform
from kvest.propose.value_norm import ValueNorm
from kvest.propose.value_range import ValueRange
from kvest.propose.with_certain import WithCertain

__all__ = [
    "H2O",
    "PROPOSALS",
    "CapKV",
    "CapKVGreedy",
    "Chunked",
    "Compactor",
    "Critical",
    "CurDKV",
    "Defensive",
    "ExpectedAttention",
    "Harmonic",
    "KeyDiff",
    "KVzip",
    "KeyNorm",
    "LagKV",
    "LastQuery",
    "Lava",
    "Leverage",
    "Mixed",
    "MomentResidual",
    "NonCausal",
    "OutputError",
    "Propose",
    "Sharp",
    "SnapKV",
    "Streaming",
    "Uniform",
    "ValueNorm",
    "ValueRange",
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
    "capkv_greedy": CapKVGreedy,
    "value_norm": ValueNorm,
    "value_range": ValueRange,
    "lagkv": LagKV,
    "expected_attention": ExpectedAttention,
    "leverage": Leverage,
    "noncausal": NonCausal,
    "compactor": Compactor,
    "curdkv": CurDKV,
    "lava": Lava,
    "moment_residual": MomentResidual,
    "kvzip": KVzip,
    "mixed": Mixed,
    "with_certain": WithCertain,
    "sharp": Sharp,
    "chunked": Chunked,
    "defensive": Defensive,
    "critical": Critical,
}
"""Name in a policy -> method. Wrappers take a proposal as their first argument."""
