"""Evicted entries that are kept elsewhere and brought back: right, counted, and out of the way."""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile

import pytest
import torch

import kvest
from build import first_round
from hf_tools import feed, hybrid, singly, tokens
from kvest.attend import attend
from kvest.policy import Policy
from kvest.random import Stream
from kvest.retain import Store
from reference_standins import recall

ALWAYS = "recall(1.0, 1.0)"
"""Brings everything back for every query: the full cache."""


def evicted(generator, text="recall(0.8, 0.5)"):
    """(observation, its store after an eviction)"""
    o = first_round(generator)
    policy = Policy.parse(f"h2o+one_threshold/top_k/none+{text}@9", sinks=2, window=3)
    [kept] = policy.evict([o], [Stream(7, 0, [0, 0])])
    return o, Store(kept)


def walk(generator, store, groups, count, step=0.6):
    """Queries that move on little by little, as [b, hg, q, d]."""
    first = torch.randn(store.rows, store.heads * groups, 1, store.keys.shape[1], generator=generator)
    moves = step * torch.randn(*first.shape[:2], count, first.shape[3], generator=generator)
    return first + moves.cumsum(dim=2)


@pytest.mark.parametrize("pieces", [(1,) * 12, (12,), (5, 1, 6)])
def test_outputs_are_the_twins(pieces, generator):
    """Queries that are near, in between and far, in one pass and in several; and as many recalls."""
    o, store = evicted(generator)
    before = {(b, h): store.lengths[b * 3 + h] for b, h in itertools.product(range(2), range(3))}
    queries = walk(generator, store, 5, 12)
    keys, values = (torch.randn(2, 3, 12, n, generator=generator) for n in (14, 7))
    outputs, at = [], 0
    for n in pieces:
        part = slice(at, at + n)
        store.append(keys[:, :, part], values[:, :, part], torch.arange(50, 50 + n).expand(2, n))
        outputs.append(attend(queries[:, :, part], store, 0.31))
        at += n
    got = torch.cat(outputs, dim=2).view(2, 3, 5, 12, 7)
    times = 0
    for (b, h), count in before.items():
        where = set(store.head(store.positions, b, h)[:count].tolist())
        entries = zip(*(store.head(x, b, h).double().tolist() for x in (store.keys, store.values)), strict=True)
        held = [(k, v, 0.0) for k, v in entries]
        slots = [i for i in range(o.keys.shape[2]) if o.valid[b, h, i] and int(o.positions[b, h, i]) not in where]
        gone = [(o.keys[b, h, i].double().tolist(), o.values[b, h, i].double().tolist(), 0.0) for i in slots]
        assert len(gone) == int(o.lengths[b, h]) - count > 0
        mine = queries.view(2, 3, 5, 12, 14)[b, h].transpose(0, 1).double().tolist()
        want, asked = recall(mine, [count + j + 1 for j in range(12)], held, gone, 0.31, 0.8, 0.5)
        assert 1 < asked < 12
        times += asked
        want64 = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(got[b, h].transpose(0, 1).double(), want64, rtol=1e-5, atol=1e-5)
    assert store.elsewhere is not None
    assert store.elsewhere.times == times


def test_between_the_thresholds_only_what_is_kept_answers(generator):
    """And beside them, the last answer, bit for bit; a query head that is far asks for all heads of its group."""
    _, store = evicted(generator, "recall(0.9, 0.1)")
    key, value = torch.zeros(2, 3, 1, 14), torch.zeros(2, 3, 1, 7)
    store.append(key, value, torch.tensor([[50], [50]]))
    first = torch.randn(2, 15, 1, 14, generator=generator)
    attend(first, store, 0.31)
    answered = store.elsewhere
    across = torch.randn(2, 15, 1, 14, generator=generator)
    across -= (across * first).sum(-1, keepdim=True) / first.square().sum(-1, keepdim=True) * first
    half = first / first.norm(dim=-1, keepdim=True) + across / across.norm(dim=-1, keepdim=True)  # cos 0.71
    got = attend(half, store, 0.31)
    assert store.elsewhere.times == answered.times == 6
    store.elsewhere = None
    torch.testing.assert_close(got, attend(half, store, 0.31))
    for scale in (1.0, 3.0):
        store.elsewhere = answered
        attend(scale * first, store, 0.31)
        assert store.elsewhere.times == 6
        assert torch.equal(store.elsewhere.last.output, answered.last.output)
    far = first.clone()
    far[0, 4] = -far[0, 4]
    attend(far, store, 0.31)
    assert store.elsewhere.times == 7
    changed = (store.elsewhere.last.reference != answered.last.reference).any(dim=-1)
    assert changed.nonzero().tolist() == [[0, 0, 4]]


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize(
    "policy",
    [f"snapkv(11)/top_k/none+{ALWAYS}@0.25", f"h2o(values=True)+one_threshold/top_k/none+{ALWAYS}@41, every=7"],
)
def test_brought_back_at_once_it_is_the_full_cache(policy, where, tiny_model, generator):
    """Over turns, rounds of a standing budget and rows with padding."""
    model = tiny_model()
    ids = tokens(generator, 97, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    cache = kvest.EvictionCache(model, policy.replace("1.0)", f"1.0, where={where})"))
    everything = kvest.EvictionCache(model, "uniform/top_k/none@1.0")
    feed(model, cache, ids, mask), feed(model, everything, ids, mask)
    for count in (1, 1, 23, *[1] * 9):
        piece = tokens(generator, count, rows=2)
        mask = torch.cat([mask, torch.ones_like(piece)], dim=1)
        want = feed(model, everything, piece, mask)
        torch.testing.assert_close(feed(model, cache, piece, mask), want, rtol=1e-4, atol=1e-4)
    report = cache.report()
    assert report.kept.sum() < everything.report().kept.sum()
    assert report.recalls > 0


def test_layers_with_a_window_keep_their_own(generator):
    model = hybrid()
    cache = kvest.EvictionCache(model, f"keydiff/top_k/none+{ALWAYS}@0.25")
    everything = kvest.EvictionCache(model, "uniform/top_k/none@1.0")
    ids, question = tokens(generator, 61), tokens(generator, 7)
    feed(model, cache, ids), feed(model, everything, ids)
    torch.testing.assert_close(feed(model, cache, question), feed(model, everything, question), rtol=1e-4, atol=1e-4)


def test_bytes_and_times_are_counted(tiny_model, generator):
    """What is elsewhere is no part of what is held; the first token brings all of it back, an equal one nothing."""
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, "snapkv(11)/top_k/none+recall(1.0, -1.0)@0.25")
    plain = kvest.EvictionCache(model, "snapkv(11)/top_k/none@0.25")
    prompt = tokens(generator, 120)
    feed(model, cache, prompt), feed(model, plain, prompt)
    report, same = cache.report(), plain.report()
    gone = (report.seen[0] - report.kept).sum().item()
    assert report.kept_bytes == same.kept_bytes
    assert report.elsewhere_bytes == gone * (8 + 8 + 1) * 4
    assert (report.recalls, report.recalled_bytes) == (0, 0)
    singly(model, cache, tokens(generator, 5))
    report = cache.report()
    assert (report.recalls, report.recalled_bytes) == (4, gone * (8 + 8) * 4)
    assert "elsewhere    23.9 KiB of evicted entries\nbrought back 4 times by a head, 22.5 KiB" in str(report)
    assert "elsewhere" not in str(same)


def test_what_is_on_disk_is_mapped_and_leaves_nothing_behind(tiny_model, generator, tmp_path, monkeypatch):
    """The file has no name any more once it is mapped, and tensors of the cache do not hold its bytes in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tiny_model(layers=2)
    with open("/proc/self/maps") as file:
        assert "kvest-recall" not in file.read()
    cache = kvest.EvictionCache(model, "snapkv(11)/top_k/none+recall(where=disk)@0.25")
    feed(model, cache, tokens(generator, 120))
    with open("/proc/self/maps") as file:
        mapped = [line for line in file if "kvest-recall" in line]
    assert len(mapped) >= 2  # one a layer
    assert all(str(tmp_path) in line and "(deleted)" in line for line in mapped)
    assert list(tmp_path.iterdir()) == []
    del cache
    gc.collect()
    with open("/proc/self/maps") as file:
        assert "kvest-recall" not in file.read()


def test_copies_and_branches_share_what_is_gone_and_remember_for_themselves(tiny_model, generator):
    model = tiny_model(layers=2)
    cache = kvest.EvictionCache(model, "snapkv(11)/top_k/none+recall(0.5, 0.3)@0.25")
    feed(model, cache, tokens(generator, 120))
    feed(model, cache, tokens(generator, 3))
    twin = copy.deepcopy(cache)
    stores = [x.layers[0].store.elsewhere for x in (cache, twin)]
    assert stores[0].gone[0][0].keys is stores[1].gone[0][0].keys
    before = cache.report().recalls
    with cache.branch():
        feed(model, cache, tokens(generator, 9))
        assert cache.report().recalls > before
    assert cache.report().recalls == before == twin.report().recalls
    question = tokens(generator, 5)
    torch.testing.assert_close(feed(model, cache, question), feed(model, twin, question), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv/systematic/inclusion+recall@0.25", "brings back what is gone itself.*write /none"),
        ("snapkv/top_k/none+recall(0.5, 0.7)@0.25", "below <= reuse <= 1, not below=0.7 and reuse=0.5"),
        ("snapkv/top_k/none+recall(1.5)@0.25", "not below=0.7 and reuse=1.5"),
        ("snapkv/top_k/none+recall(where=cloud)@0.25", "host or disk"),
    ],
)
def test_what_cannot_be_is_said(text, says):
    with pytest.raises(ValueError, match=says):
        Policy.parse(text)
