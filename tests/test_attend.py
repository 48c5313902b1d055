"""Attention over weighted entries against its twin: one softmax, `logit_i = scale q.k_i + log_weight_i`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvest.attend.dense
import kvest.attend.reference
import kvest.attend.stored
import reference_sampling as reference
from kvest import attention
from kvest.attend import attend
from kvest.retain import Store
from kvest.types import Retained

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS = {"gqa": (3, 5), "mha": (3, 1), "mqa": (1, 5)}  # KV heads, query heads for each
SCALE = 0.23


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (1 + torch.randn(shape, generator=generator)).to(dtype)


def twin(queries: Tensor, keys: Tensor, values: Tensor, log_weights: Tensor) -> Tensor:
    out, group = torch.zeros(*queries.shape[:3], values.shape[-1]), queries.shape[1] // keys.shape[1]
    for row, head, j in torch.cartesian_prod(*(torch.arange(n) for n in queries.shape[:3])).tolist():
        q, at = queries[row, head, j], (row, head // group)
        out[row, head, j] = reference.attention(q, keys[at], values[at], log_weights[at], SCALE)
    return out


def near(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [13, 7], ids=["e=d", "e!=d"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("q", [1, 7])
@pytest.mark.parametrize("heads", HEADS)
def test_dense_attention_equals_its_twin(heads, q, dtype, width, generator):
    """Weights from e^-20 to e^20 and entries that are absent."""
    h, g = HEADS[heads]
    queries, keys = draw(generator, 2, h * g, q, 13, dtype=dtype), draw(generator, 2, h, 23, 13, dtype=dtype)
    values, log_weights = draw(generator, 2, h, 23, width, dtype=dtype), 3 * torch.randn(2, h, 23, generator=generator)
    log_weights[:, :, 4], log_weights[:, :, 5], log_weights[:, :, 6:9] = 20.0, -20.0, -torch.inf
    near(attention(queries, keys, values, log_weights, SCALE), twin(queries, keys, values, log_weights))
    exact = attention(queries, keys, values, scale=SCALE)
    near(exact, twin(queries, keys, values, torch.zeros_like(log_weights)))
    oracle = kvest.attend.reference.attention(queries, keys, values, log_weights, SCALE)
    near(oracle.to(dtype), twin(queries, keys, values, log_weights))


def test_weights_are_not_rounded_to_the_dtype_of_the_keys(generator):
    """A log weight of 7.007 is 7.0 in bfloat16: with equal values of 0 and 1 that would show in float32."""
    queries, keys = torch.zeros(1, 1, 1, 13, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 13, dtype=torch.bfloat16)
    values = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)[:, None].expand(1, 1, 2, 13)
    log_weights = torch.tensor([[[7.0, 7.015]]])
    got = attention(queries, keys, values * 64, log_weights, 1.0)
    assert abs(float(got[0, 0, 0, 0]) - 64 / (1 + 2.718281828**-0.015)) < 0.126  # half a spacing of bfloat16 at 32


def test_the_default_scale_is_1_over_sqrt_d(generator):
    queries, keys, values = (draw(generator, 1, 2, 5, 13) for _ in range(3))
    assert torch.equal(attention(queries, keys, values), attention(queries, keys, values, scale=13**-0.5))


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"attention needs queries .*\(2, 7, 5, 13\)"):
        attention(torch.ones(2, 7, 5, 13), torch.ones(2, 3, 23, 13), torch.ones(2, 3, 23, 7))


def store(generator: torch.Generator, counts, dtype: torch.dtype = torch.float32, width: int = 13) -> Store:
    """Some heads that hold `counts` kept entries with weights."""
    s = sum(sum(row) for row in counts)
    log_weights = 3 * torch.rand(s, generator=generator)
    log_weights[::11] = 20.0
    return Store(
        Retained(
            draw(generator, s, 13, dtype=dtype),
            draw(generator, s, width, dtype=dtype),
            log_weights,
            torch.cat([torch.arange(n, dtype=torch.int32) for row in counts for n in row]),
            counts,
        )
    )


def twin_of_store(queries: Tensor, held: Store, exists: Tensor) -> Tensor:
    """Query by query: each sees the entries that were there before it came, and its own."""
    b, heads, q, _ = queries.shape
    out, group = torch.zeros(b, heads, q, held.values.shape[1]), heads // held.heads
    for row, head, j in torch.cartesian_prod(*(torch.arange(n) for n in (b, heads, q))).tolist():
        if exists[row, j]:
            k, v, l = (held.head(x, row, head // group) for x in (held.keys, held.values, held.log_weights))
            sees = len(k) - int(exists[row, j + 1 :].sum())
            out[row, head, j] = reference.attention(queries[row, head, j], k[:sees], v[:sees], l[:sees], SCALE)
    return out


COUNTS = {
    "equal": lambda h: ((11,) * h,) * 2,
    "1:4": lambda h: (tuple(5 * 4 ** (i % 2) for i in range(h)), tuple(20 - 5 * i for i in range(h))),
    "one entry": lambda h: ((1,) * h,) * 2,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("q", [1, 7])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_a_store_equals_its_twin(heads, counts, q, padding, dtype, generator):
    """After an append, with free slots behind each head; padding anywhere among the new tokens of the second row."""
    h, g = HEADS[heads]
    held = store(generator, COUNTS[counts](h), dtype)
    exists = torch.ones(2, q, dtype=torch.bool)
    if padding:
        exists[1, ::2] = False
    positions = 100 + torch.arange(q).expand(2, q)
    new = [draw(generator, 2, h, q, 13, dtype=dtype) for _ in range(2)]
    held.append(*new, positions, exists if padding else None)
    queries = draw(generator, 2, h * g, q, 13, dtype=dtype)
    got = attend(queries, held, SCALE, exists if padding else None)
    assert got.shape == (2, h * g, q, 13)
    real = exists[:, None].expand(2, h * g, q)
    near(got[real], twin_of_store(queries, held, exists)[real])


@pytest.mark.parametrize("block", [None, 7 * 400])
def test_many_queries_go_block_by_block(block, generator, monkeypatch):
    """300 queries at once equal 300 tokens one by one, whatever the size of a block."""
    if block is not None:
        monkeypatch.setattr(kvest.attend.stored, "BLOCK_ELEMENTS", block)
    held, single = (store(torch.Generator().manual_seed(3), ((17, 5, 11),)) for _ in range(2))
    keys, values, queries = (draw(generator, 1, n, 300, 13) for n in (3, 3, 6))
    positions = torch.arange(300)[None]
    held.append(keys, values, positions)
    got, steps = attend(queries, held, SCALE), []
    for j in range(300):
        at = slice(j, j + 1)
        single.append(keys[:, :, at], values[:, :, at], positions[:, at])
        steps.append(attend(queries[:, :, at], single, SCALE))
    torch.testing.assert_close(got, torch.cat(steps, dim=2), rtol=1e-4, atol=1e-5)


def test_dense_attention_goes_block_by_block(generator, monkeypatch):
    queries, keys, values = draw(generator, 2, 6, 101, 13), draw(generator, 2, 3, 23, 13), draw(generator, 2, 3, 23, 7)
    log_weights = torch.randn(2, 3, 23, generator=generator)
    whole = attention(queries, keys, values, log_weights)
    monkeypatch.setattr(kvest.attend.dense, "BLOCK_ELEMENTS", 2 * 3 * 23 * 17)
    torch.testing.assert_close(attention(queries, keys, values, log_weights), whole)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equal_keys_give_the_weighted_mean_of_the_values(dtype, generator):
    keys, values = torch.ones(1, 1, 23, 13, dtype=dtype), draw(generator, 1, 1, 23, 13, dtype=dtype)
    log_weights = torch.randn(1, 1, 23, generator=generator)
    got = attention(draw(generator, 1, 2, 3, 13, dtype=dtype), keys, values, log_weights)
    near(got, ((log_weights.double().exp() / log_weights.double().exp().sum()) @ values.double()).expand(1, 2, 3, 13))


@pytest.mark.parametrize("q", [1, 7])
def test_one_live_entry_gives_its_value(q, generator):
    """All others have log weight -inf, some of them far larger logits."""
    keys, values = draw(generator, 1, 1, 23, 13) * 30, draw(generator, 1, 1, 23, 13)
    log_weights = torch.full((1, 1, 23), -torch.inf)
    log_weights[..., 16] = -20.0
    got = attention(draw(generator, 1, 2, q, 13), keys, values, log_weights)
    torch.testing.assert_close(got, values[:, :, 16:17].expand(1, 2, q, 13))


def test_a_row_that_holds_nothing_yet_is_harmless(generator):
    """Its queries are all padding: their output means nothing, and it is finite."""
    held = store(generator, ((5, 3), (0, 0)))
    exists = torch.tensor([[True, True, True], [False, False, False]])
    held.append(draw(generator, 2, 2, 3, 13), draw(generator, 2, 2, 3, 13), 100 + torch.arange(3).expand(2, 3), exists)
    queries = draw(generator, 2, 4, 3, 13)
    got = attend(queries, held, SCALE, exists)
    near(got[0], twin_of_store(queries, held, exists)[0])
    assert torch.isfinite(got).all()
