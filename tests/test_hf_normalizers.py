"""What the prompt's own attention has worked out is not worked out again by proposals that look at every query."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import feed, same_entries, tokens
from kvest import observe
from kvest.hf import compat

POLICY = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25"


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each observation that is scored has normalizers."""
    found = []
    blocks = observe.blocks

    def spy(observation, *args, **kwargs):
        found.append(observation.normalizers is not None)
        return blocks(observation, *args, **kwargs)

    monkeypatch.setattr(observe, "blocks", spy)
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_the_same_entries_with_and_without(tiny_model, generator, monkeypatch, padded):
    model, prompt = tiny_model(), tokens(generator, 97, rows=2)
    mask = torch.ones_like(prompt)
    mask[1, : 31 * padded] = 0
    found = seen_by(monkeypatch)
    told, untold = (kvest.EvictionCache(model, POLICY) for _ in range(2))
    feed(model, told, prompt, mask)
    assert found
    assert all(found)
    monkeypatch.setattr(compat.Normalizers, "of", lambda *args: None)
    found.clear()
    feed(model, untold, prompt, mask)
    assert found
    assert not any(found)
    for row in (0, 1):
        same_entries(told.report(), row, untold.report(), row)


def test_eager_attention_tells_nothing_and_works(tiny_model, generator, monkeypatch):
    found = seen_by(monkeypatch)
    sdpa, eager = tiny_model(), tiny_model()
    eager.set_attn_implementation("eager")
    prompt = tokens(generator, 97)
    caches = [kvest.EvictionCache(model, POLICY) for model in (sdpa, eager)]
    for model, cache in zip((sdpa, eager), caches, strict=True):
        found.clear()
        feed(model, cache, prompt)
        assert all(found) == (model is sdpa)
    same_entries(caches[0].report(), 0, caches[1].report(), 0, tolerance=1e-4)


def test_several_passes_go_without(tiny_model, generator, monkeypatch):
    """Queries of two chunks, the second of which saw an evicted cache or one that came before."""
    model, prompt = tiny_model(), tokens(generator, 97)
    found = seen_by(monkeypatch)
    cache = kvest.EvictionCache(model, "h2o/top_k/none@60, every=10")
    feed(model, cache, prompt[:, :31])  # within the budget
    assert not found
    feed(model, cache, prompt[:, 31:])
    assert found
    assert not any(found)
    assert cache.report().kept.unique().tolist() == [60]
