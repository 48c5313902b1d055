"""Leverage: keys that no combination of the others replaces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.propose._base import Propose, at_least, each_head, propose_score, rotation_of, tokens
from kvest.random import gaussian
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class Leverage(Propose):
    """score_i = x_i^T (X^T X + ridge I)^-1 x_i,  x_i = (k_i - mean k) G / sqrt(sketch),  k before their rotation

    G is Gaussian, `d` by `sketch`, one for each layer, the same for a `seed` on every machine; keys no wider than
    `sketch` are taken as they are. An entry that was kept before counts by its weight in the mean and in X^T X; the
    score is that of one of those it stands for. Made entries do not count: they lie at no position. Memory: one head's
    keys in float64.

    Source: Compactor, arXiv:2507.08143.
    Unlike the paper: one sketch for all heads of a layer; not standardised, which `compactor` does. kvpress 0.5.5 draws
    a new sketch for each head and call from the global random state: its scores cannot be reproduced, not by itself
    either.
    """

    sketch: int = 48
    ridge: float = 1e-2
    seed: int = 0
    needs_rotation = True

    def __post_init__(self) -> None:
        at_least(1, sketch=self.sketch)
        at_least(0, seed=self.seed)
        if not self.ridge > 0:
            raise ValueError(f"leverage needs ridge > 0, or few keys have no inverse: not {self.ridge!r}")

    def __call__(self, observation: Observation) -> Proposal:
        rotation_of(observation)
        d = observation.keys.shape[-1]
        matrix = None
        if d > self.sketch:
            matrix = gaussian(self.seed, observation.layer, d, self.sketch).to(observation.keys.device)
            matrix = matrix / self.sketch**0.5
        return propose_score(observation, each_head(observation, lambda part, _: self._leverage(part, matrix)))

    def _leverage(self, part: Observation, matrix: Float[Tensor, "d r"] | None) -> Float[Tensor, "t"]:
        """Of one head."""
        counted = tokens(part)[0, 0]
        weights = part.log_weights[0, 0].double().exp().masked_fill(~counted, 0.0)
        x = rotation_of(part).undo(part.keys[0, 0], part.positions[0, 0]).double().masked_fill(~counted[:, None], 0.0)
        x = x - (weights @ x) / weights.sum().clamp_min(1.0)
        x = x if matrix is None else x @ matrix
        gram = (x * weights[:, None]).T @ x
        floor = 1e-12 * gram.trace()  # keys so large that the ridge is lost to rounding
        ridge = floor.clamp_min(self.ridge) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky_ex(gram + ridge).L  # fails for NaN only, which the policy reports
        return torch.linalg.solve_triangular(factor, x.T, upper=False).square().sum(dim=0).float()
