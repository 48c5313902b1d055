"""The oracle: attention over weighted entries in float64, a loop over everything."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def attention(
    queries: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    log_weights: Float[Tensor, "b h t"],
    scale: float,
) -> Float[Tensor, "b hg q e"]:
    """`sum_i w_i exp(scale q.k_i) v_i / sum_i w_i exp(scale q.k_i)`, as it is written."""
    b, heads, q, _ = queries.shape
    group = heads // keys.shape[1]
    out = torch.empty(b, heads, q, values.shape[-1], dtype=torch.float64)
    for row in range(b):
        for head in range(heads):
            k, v = keys[row, head // group].double(), values[row, head // group].double()
            for j in range(q):
                logits = scale * (k @ queries[row, head, j].double()) + log_weights[row, head // group].double()
                mass = (logits - logits.max()).exp()
                out[row, head, j] = (mass @ v) / mass.sum()
    return out
