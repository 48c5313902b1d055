"""Stand-ins: what does a head hold for what is gone?  `Draw, log weights -> Kept`. One a file, one line here."""

from kvest.stand_in._base import StandIn
from kvest.stand_in.centroids import Centroids
from kvest.stand_in.merge import Merge
from kvest.stand_in.moments import Moments
from kvest.stand_in.none import NoStandIn
from kvest.stand_in.recall import Recall

__all__ = [
    "STAND_INS",
    "Centroids",
    "Merge",
    "Moments",
    "NoStandIn",
    "Recall",
    "StandIn",
]

STAND_INS: dict[str, type[StandIn]] = {
    "none": NoStandIn,
    "centroids": Centroids,
    "merge": Merge,
    "moments": Moments,
    "recall": Recall,
}
