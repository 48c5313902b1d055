"""Attention over entries that stand in one rectangular block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Logits or bias held at once (16 MiB in float32)."""


def attention(
    queries: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    log_weights: Float[Tensor, "b h t"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b hg q e"]:
    """Attention over weighted entries: `sum_i w_i exp(scale q.k_i) v_i / sum_i w_i exp(scale q.k_i)`

    `hg` query heads share `h` KV heads, in consecutive groups; every query sees every entry. Entries of log weight -inf
    are absent. `log_weights` is None for exact entries; `scale` defaults to 1/sqrt(d). The softmax is in float32,
    weights are never rounded to the dtype of the keys. Memory: O(q t) for the logits of one block of queries.

    Raises ValueError when the shapes disagree.
    """
    b, heads, q, d = queries.shape
    h, t = keys.shape[1:3]
    weights_shape = None if log_weights is None else tuple(log_weights.shape)
    if (
        keys.shape != (b, h, t, d)
        or values.shape[:3] != (b, h, t)
        or heads % h
        or weights_shape not in (None, (b, h, t))
    ):
        raise ValueError(
            "attention needs queries [b, h*g, q, d], keys [b, h, t, d], values [b, h, t, e] and log_weights [b, h, t], "
            f"not {tuple(queries.shape)}, {tuple(keys.shape)}, {tuple(values.shape)} and {weights_shape}"
        )
    scale = d**-0.5 if scale is None else scale
    bias = None if log_weights is None else log_weights.float()[:, :, None]
    packed = queries.reshape(b, h, (heads // h) * q, d)
    rows = max(1, BLOCK_ELEMENTS // max(b * h * t, 1))
    parts = [weighted(part, keys, values, bias, scale) for part in torch.split(packed, rows, dim=2)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).view(b, heads, q, -1)


def weighted(
    queries: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    bias: Float[Tensor, "#b #h #q t"] | None,
    scale: float,
) -> Float[Tensor, "b h q e"]:
    """One softmax over `scale q.k + bias`, by the fastest way that keeps the bias in float32.

    On a CPU that is the flash kernel, which takes a float32 bias for every dtype; elsewhere matmul, softmax, matmul.
    """
    if queries.is_cpu and keys.shape[-1] == values.shape[-1]:
        return torch._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=bias, scale=scale
        )[0]
    return torch.softmax(_logits(queries, keys, bias, scale), dim=-1).to(values.dtype) @ values


def weighted_and_mass(
    queries: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    bias: Float[Tensor, "#b #h #q t"],
    scale: float,
) -> Float[Tensor, "b h q w"]:
    """As `weighted`, in float32, with log sum_i w_i exp(scale q.k_i) as one more channel behind (`w` is `e + 1`)."""
    if queries.is_cpu and keys.shape[-1] == values.shape[-1]:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=bias, scale=scale
        )
    else:
        logits = _logits(queries, keys, bias, scale)
        out, lse = torch.softmax(logits, dim=-1) @ values.float(), torch.logsumexp(logits, dim=-1)
    return torch.cat([out.float(), lse.float()[..., None]], dim=-1)


def weighted_with_sinks(
    queries: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    bias: Float[Tensor, "#b #h #q t"] | None,
    scale: float,
    sinks: Float[Tensor, "#b h #q"],
) -> Float[Tensor, "b h q e"]:
    """As `weighted`, with one more logit in each softmax that has no value: `out * sigmoid(lse - sink)`

    lse is the log of the sum of the weighted exponentials over the entries. A sink is not an entry: it is never
    evicted, and has no weight.
    """
    sinks = sinks.float()
    if queries.is_cpu and keys.shape[-1] == values.shape[-1]:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=bias, scale=scale
        )
        return out * torch.sigmoid(lse.float() - sinks)[..., None].to(out.dtype)
    logits = _logits(queries, keys, bias, scale)
    share = torch.sigmoid(torch.logsumexp(logits, dim=-1) - sinks)[..., None]
    return (torch.softmax(logits, dim=-1) * share).to(values.dtype) @ values


def weighted_with_slopes(
    queries: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h t d"],
    values: Float[Tensor, "b h t e"],
    bias: Float[Tensor, "#b #h #q t"],
    scale: float,
    slopes: Float[Tensor, "#b #h e d"],
    sinks: Float[Tensor, "#b #h #q"] | None = None,
) -> Float[Tensor, "b h q e"]:
    """As `weighted`, where the value of the first entry is `v + slope @ q`: `out + p_0 slope @ q`

    p_0 = exp(logit_0 - lse) is that entry's probability: nothing is computed twice. `sinks`: `weighted_with_sinks`.
    """
    if queries.is_cpu and keys.shape[-1] == values.shape[-1]:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=bias, scale=scale
        )
        first = scale * (queries.float() * keys[..., :1, :].float()).sum(dim=-1) + bias[..., 0]
        out, probability = out.float(), (first - lse.float()).exp()
    else:
        logits = _logits(queries, keys, bias, scale)
        lse = torch.logsumexp(logits, dim=-1)
        probabilities = (logits - lse[..., None]).exp()
        out, probability = (probabilities.to(values.dtype) @ values).float(), probabilities[..., 0]
    out = out + probability[..., None] * (queries.float() @ slopes.float().transpose(2, 3))
    if sinks is not None:
        out = out * torch.sigmoid(lse.float() - sinks.float())[..., None]
    return out.to(values.dtype)


def _logits(
    queries: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "b h t d"],
    bias: Float[Tensor, "#b #h #q t"] | None,
    scale: float,
) -> Float[Tensor, "b h q t"]:
    """`scale q.k + bias` in float32: rounded to bfloat16 they would be off by 1 %."""
    logits = (queries.float() * scale) @ keys.float().transpose(2, 3)
    return logits if bias is None else logits + bias
