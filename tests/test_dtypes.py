"""float32, bfloat16 and float16: finite at the extremes, weights in float32, stock bit for bit where all is kept."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvest
import reference_sampling as reference
from hf_tools import POLICIES, feed, singly, tokens
from kvest import attention
from kvest.attend import attend
from kvest.hf.layer import EvictionLayer
from kvest.retain import Store
from kvest.types import Retained

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}
HALF = (torch.bfloat16, torch.float16)


def held(keys, values, log_weights) -> Store:
    """One row, one head."""
    t = len(keys)
    return Store(Retained(keys, values, log_weights, torch.arange(t, dtype=torch.int32), ((t,),)))


def both(queries, keys, values, log_weights, scale):
    """Dense attention and attention over a store, of one query of one head; float64."""
    dense = attention(queries[None, None, None], keys[None, None], values[None, None], log_weights[None, None], scale)
    stored = attend(queries[None, None, None], held(keys, values, log_weights), scale)
    assert dense.dtype == stored.dtype == keys.dtype
    return dense[0, 0, 0].double(), stored[0, 0, 0].double()


def check(queries, keys, values, log_weights, scale, tolerance):
    want = reference.attention(queries, keys, values, log_weights, scale).double()
    for got in both(queries, keys, values, log_weights, scale):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_10000_do_not_overflow(dtype, generator):
    """Logits of 1e7 and more: beyond float16, and far enough apart for one entry to win, whatever the rounding."""
    keys = torch.randn(61, 16, generator=generator)
    keys, query = 1e4 * keys / keys.norm(dim=1, keepdim=True), torch.randn(16, generator=generator)
    query = (1e4 * query / query.norm()).to(dtype)
    values, log_weights = 1 + torch.randn(61, 16, generator=generator), 20 * torch.rand(61, generator=generator)
    check(query, keys.to(dtype), values.to(dtype), log_weights, 0.25, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_weight", [20.0, -20.0])
def test_log_weights_of_20_among_equal_keys(dtype, log_weight, generator):
    keys, values = torch.ones(61, 16, dtype=dtype), (1 + torch.randn(61, 16, generator=generator)).to(dtype)
    log_weights = torch.zeros(61)
    log_weights[7] = log_weight
    check(torch.ones(16, dtype=dtype), keys, values, log_weights, 0.25, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_live_entry_gives_its_value(dtype, generator):
    keys, values = 30 * torch.randn(61, 16, generator=generator), torch.randn(61, 16, generator=generator)
    log_weights = torch.full((61,), -torch.inf)
    log_weights[33] = -20.0
    values = values.to(dtype)
    for got in both(keys[1].to(dtype), keys.to(dtype), values, log_weights, 0.25):
        assert torch.equal(got, values[33].double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_entries(dtype, generator):
    """Ten heavy entries make up half: adding the others one by one in float32, as torch's kernel does, costs 6e-4."""
    t = 10**6
    keys, values = torch.randn(t, 8, generator=generator), 1 + torch.randn(t, 8, generator=generator)
    log_weights = torch.zeros(t)
    log_weights[:: t // 10] = 12.0
    query = torch.randn(8, generator=generator).to(dtype)
    keys, values = keys.to(dtype), values.to(dtype)
    logits = 0.35 * keys.double() @ query.double() + log_weights.double()
    want = torch.softmax(logits, dim=0) @ values.double()
    tolerance = max(DTYPES[dtype], 2e-3)
    for got in both(query, keys, values, log_weights, 0.35):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_model_in_half_precision_is_evicted_with_weights_in_float32(dtype, policy, tiny_model, generator):
    model = tiny_model(layers=2).to(dtype)
    cache = kvest.EvictionCache(model, f"{policy}, every=8")
    feed(model, cache, tokens(generator, 131, rows=2))
    assert torch.isfinite(feed(model, cache, tokens(generator, 29, rows=2))).all()
    assert torch.isfinite(singly(model, cache, tokens(generator, 3, rows=2))).all()
    assert cache.report().evictions == [2, 2]
    for layer in cache.layers:
        assert isinstance(layer, EvictionLayer)
        assert layer.store.keys.dtype == layer.store.values.dtype == dtype
        assert layer.store.log_weights.dtype == torch.float32
        kept = torch.cat([w for row in range(2) for w in cache.report().log_weights[layer.index][row]])
        assert kept.dtype == torch.float32
        assert torch.isfinite(kept).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["large", "equal"])
def test_scores_are_finite_at_large_norms_and_at_equal_keys(dtype, policy, kind, tiny_model, generator):
    """Projections so large that keys and queries have norms of 1e4; or none but a bias, the same for all tokens."""
    model = tiny_model(layers=1).to(dtype)
    attend_to = model.model.layers[0].self_attn
    if kind == "large":
        for each in (attend_to.q_proj, attend_to.k_proj):
            each.weight.data.mul_(1e4 / 3**0.5 / each.weight.data.float().norm(dim=1).mean())
    else:
        attend_to.k_proj.weight.data.zero_()
        attend_to.k_proj.bias.data.zero_()
    cache = kvest.EvictionCache(model, policy)
    prompt = tokens(generator, 131)
    feed(model, cache, prompt)
    store = cache.layers[0].store
    if kind == "large":
        assert store.keys.float().norm(dim=1).mean() > 5e3
    assert torch.isfinite(store.log_weights).all()
    assert torch.isfinite(feed(model, cache, prompt[:, :7])).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_keep_1_in_half_precision_is_stock_bit_for_bit(dtype, tiny_model, generator):
    model, prompt, question = tiny_model().to(dtype), tokens(generator, 97, rows=2), tokens(generator, 5, rows=2)
    logits = []
    for cache in (DynamicCache(config=model.config), kvest.EvictionCache(model, "h2o/systematic/inclusion@1.0")):
        logits.append([feed(model, cache, prompt), feed(model, cache, question), singly(model, cache, question)])
    for want, got in zip(*logits, strict=True):
        assert torch.equal(got, want)
