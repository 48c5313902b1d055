"""Independent twins in float64 of designs, corrections and weighted attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvest.types import Draw, Observation
from reference import Head, norm


def attention(q: Tensor, k: Tensor, v: Tensor, log_weights: Tensor, scale: float) -> Tensor:
    """sum_i w_i exp(scale q.k_i) v_i / sum_i w_i exp(scale q.k_i) for one query and one head's entries."""
    logits = [scale * float(q.double() @ key.double()) + float(x) for key, x in zip(k, log_weights, strict=True)]
    top, above, below = max(logits), torch.zeros(v.shape[1], dtype=torch.float64), 0.0
    for logit, value in zip(logits, v.double(), strict=True):
        above, below = above + math.exp(logit - top) * value, below + math.exp(logit - top)
    return above / below


def inclusion(x: Sequence[float], m: float) -> list[float]:
    """pi_i = min(1, c x_i) with sum pi = m, c by bisection; m at most the number of positive scores."""
    low, high = 0.0, max(1.0, m) / min(a for a in x if a > 0)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * a) for a in x) < m else (low, c)
    return [min(1.0, high * a) for a in x]


def distinct(x: Sequence[float], draws: float) -> list[float]:
    """P(drawn at least once) in `draws` draws with replacement from x / sum x."""
    return [1 - (1 - a / sum(x)) ** draws for a in x]


def draws_for(x: Sequence[float], m: int, most: int = 16) -> int:
    """The largest number of draws whose expected number of distinct entries is at most m, and at least 1."""
    n = 1
    while n < most * len(x) and sum(distinct(x, n + 1)) <= m:
        n += 1
    return n


def log_weights(draw: Draw, of: str, tau: float = 1.0) -> Tensor:
    """-tau log pi_i or tau log(c_i / (n x_i)) on kept entries, 0 elsewhere."""
    out = torch.zeros(draw.keep.shape, dtype=torch.float64)
    for at in draw.keep.nonzero().tolist():
        place = tuple(at)
        if of == "inclusion":
            out[place] = -tau * math.log(draw.inclusion[place])
        else:
            out[place] = tau * math.log(draw.multiplicity[place] / draw.expected[place])
    return out


def best_tau(o: Observation, draw: Draw, plain: Tensor, grid: Sequence[float], rows: int) -> Tensor:
    """The tau with the least relative squared error over the last `rows` queries, for each head."""
    best = torch.zeros(draw.keep.shape[:2])
    for row in range(best.shape[0]):
        for head in range(best.shape[1]):
            a, errors = Head(o, row, head), []
            for tau in grid:
                error = 0.0
                for j in a.asked[-rows:]:
                    for g in a.groups:
                        p = a.p(g, j)
                        exact = a.output(p)
                        kept = {
                            i: x * math.exp(tau * plain[row, head, i]) for i, x in p.items() if draw.keep[row, head, i]
                        }
                        total = sum(kept.values())
                        output = a.output({i: x / total for i, x in kept.items()}) if kept else [0.0] * len(exact)
                        error += (norm([x - y for x, y in zip(output, exact, strict=True)]) / norm(exact)) ** 2
                errors.append(error)
            best[row, head] = grid[errors.index(min(errors))]
    return best
