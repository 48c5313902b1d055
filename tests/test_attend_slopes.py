"""Attention over heads whose first entry's value is linear in the query."""

from __future__ import annotations

import pytest
import torch

from kvest.attend import attend
from kvest.attend.dense import weighted_with_slopes
from kvest.retain import Store
from kvest.types import Retained

COUNTS = ((5, 2, 11), (7, 3, 3))
SCALE, WIDTH = 0.31, 8


def store(generator: torch.Generator, values: int) -> Store:
    s = sum(sum(row) for row in COUNTS)
    made = Store(
        Retained(
            keys=1 + torch.randn(s, WIDTH, generator=generator),
            values=1 + torch.randn(s, values, generator=generator),
            log_weights=torch.rand(s, generator=generator),
            positions=torch.arange(s, dtype=torch.int32),
            counts=COUNTS,
            slopes=torch.randn(2, 3, values, WIDTH, generator=generator),
        )
    )
    new = [1 + torch.randn(2, 3, 4, n, generator=generator) for n in (WIDTH, values)]
    made.append(*new, 100 + torch.arange(4).expand(2, 4))
    return made


def twin(queries: torch.Tensor, held: Store, sinks: torch.Tensor | None) -> torch.Tensor:
    """A loop over rows, heads and queries in float64: query j of four sees all but the 3 - j latest entries."""
    out = torch.empty(*queries.shape[:3], held.values.shape[1], dtype=torch.float64)
    for row in range(2):
        for head in range(queries.shape[1]):
            own = head // 5
            keys, values, weights = (
                held.head(x, row, own).double() for x in (held.keys, held.values, held.log_weights)
            )
            for j, q in enumerate(queries[row, head].double()):
                seen = slice(0, len(keys) - queries.shape[2] + 1 + j)
                mine = values[seen].clone()
                mine[0] += held.slopes[row, own].double() @ q
                mass = (SCALE * keys[seen] @ q + weights[seen]).exp()
                beside = 0.0 if sinks is None else sinks[head].double().exp()
                out[row, head, j] = mass @ mine / (mass.sum() + beside)
    return out


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("values", [WIDTH, 13])
@pytest.mark.parametrize("learned", [False, True])
def test_attention_with_slopes_is_the_twins(count, values, learned, generator, monkeypatch):
    """One query and several, in pieces too; by the flash kernel and without it (other widths); with learned sinks."""
    held = store(generator, values)
    queries = torch.randn(2, 15, count, WIDTH, generator=generator)
    sinks = torch.randn(15, generator=generator) if learned else None
    got = attend(queries, held, SCALE, sinks=sinks)
    torch.testing.assert_close(got.double(), twin(queries, held, sinks), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("kvest.attend.stored.BLOCK_ELEMENTS", 40)
    torch.testing.assert_close(attend(queries, held, SCALE, sinks=sinks), got)


def test_padding_among_the_queries_changes_nothing(generator):
    """Row 1 wrote two entries, the latest; its queries are the second and the last."""
    held, queries = store(generator, WIDTH), torch.randn(2, 15, 4, WIDTH, generator=generator)
    exists = torch.tensor([[True] * 4, [False, True, False, True]])
    got = attend(queries, held, SCALE, exists)
    torch.testing.assert_close(got[0].double(), twin(queries, held, None)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        got[1, :, [1, 3]].double(), twin(queries[:, :, [1, 3]], held, None)[1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_output_once(dtype, generator):
    """Probability and slope are multiplied in float32."""
    parts = [torch.randn(1, 2, n, WIDTH, generator=generator).to(dtype) for n in (3, 9, 9)]
    bias = torch.rand(1, 2, 1, 9, generator=generator)
    slopes = 30 * torch.randn(1, 2, WIDTH, WIDTH, generator=generator).to(dtype)
    got = weighted_with_slopes(*parts, bias, SCALE, slopes)
    want = weighted_with_slopes(*(x.float() for x in parts), bias, SCALE, slopes.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=2 * torch.finfo(dtype).eps, atol=5 * torch.finfo(dtype).eps)
