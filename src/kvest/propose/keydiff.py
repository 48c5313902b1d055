"""KeyDiff: keys that differ from the average key."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import normalize

from kvest.propose._base import Propose, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class KeyDiff(Propose):
    """score_i = 1 - cos(k_i, m),  m = sum_i w_i k_i / norm(k_i)

    w_i is the weight of an entry that was kept before (1 for exact ones), so that m estimates the mean over all tokens.
    Source: KeyDiff, arXiv:2504.15364, which ranks by -cos.
    Unlike the paper: shifted by 1, to be non-negative.
    """

    def __call__(self, observation: Observation) -> Proposal:
        units = normalize(observation.keys.float(), dim=-1)
        weights = observation.log_weights.exp().masked_fill(~observation.valid, 0.0)
        mean = normalize(weights[..., None, :] @ units, dim=-1)
        return propose_score(observation, (1.0 - (units @ mean.transpose(2, 3))[..., 0]).clamp_min(0.0))
