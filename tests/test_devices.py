"""Layers whose weights live elsewhere: on the meta device until they are needed, on disk, on several devices."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from transformers import DynamicCache

import kvest
from build import default, first_round, second_round
from hf_tools import POLICIES, feed, same_entries, tokens
from kvest.allocate import OneThreshold
from kvest.propose import H2O
from kvest.sample import DESIGNS

STANDING = "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25, every=16"


def to_cpu(model, folder):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model, folder):
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def mixed(model, folder):
    """As `from_pretrained(device_map=...)` does: the middle layer on disk, the rest in memory."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


offloaded = pytest.mark.parametrize("offload", [to_cpu, to_disk, mixed], ids=lambda each: each.__name__)


def run(model, cache, generator):
    """A padded prompt, a question and single tokens."""
    prompt, more = tokens(generator, 97, rows=2), tokens(generator, 41, rows=2)
    mask = torch.ones_like(prompt)
    mask[0, :36] = 0
    parts = [feed(model, cache, prompt, mask)]
    for part in (more[:, :23], *more[:, 23:].split(1, dim=1)):
        mask = torch.cat([mask, torch.ones_like(part)], dim=1)
        parts.append(feed(model, cache, part, mask))
    return torch.cat(parts, dim=1)


def again():
    return torch.Generator().manual_seed(3)


@offloaded
def test_keeping_everything_is_the_stock_cache_bit_for_bit(offload, tiny_model, tmp_path):
    model = offload(tiny_model(), tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    want = run(model, DynamicCache(config=model.config), again())
    assert torch.equal(run(model, kvest.EvictionCache(model, "uniform/systematic/inclusion@1.0"), again()), want)


@pytest.mark.parametrize("policy", [POLICIES[0], "capkv+one_threshold/with_replacement/counts@0.3", STANDING])
@offloaded
def test_where_weights_wait_changes_nothing(offload, policy, tiny_model, tmp_path):
    """The same entries, weights and logits, to the bit, as with all weights in memory."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, policy, seed=2)
    want = run(model, cache, again())
    other = offload(tiny_model(), tmp_path)
    elsewhere = kvest.EvictionCache(other, policy, seed=2)
    assert torch.equal(run(other, elsewhere, again()), want)
    for row in range(2):
        same_entries(elsewhere.report(), row, cache.report(), row, tolerance=0)


@pytest.mark.parametrize("offload", [to_cpu, mixed], ids=lambda each: each.__name__)
def test_a_saved_cache_is_loaded_where_the_model_computes(offload, tiny_model, tmp_path):
    """Weights that are elsewhere do not say where: such a file is known by the config alone."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, STANDING)
    feed(model, cache, tokens(again(), 97))
    cache.save(tmp_path / "c")
    other = offload(tiny_model(), tmp_path)
    loaded = kvest.EvictionCache.load(tmp_path / "c", other)
    more = tokens(again(), 23)
    assert torch.equal(feed(other, loaded, more), feed(model, cache, more))


@pytest.mark.parametrize("make", [first_round, second_round])
@pytest.mark.parametrize("design", DESIGNS)
def test_layers_on_two_devices_compete_and_get_their_counts_where_they_are(design, make, generator):
    """Fake tensors compute nothing, but refuse to mix devices as real ones do."""
    observations = [make(generator) for _ in range(3)]
    proposals = [H2O(values=True)(o) for o in observations]
    places = [torch.device(name) for name in ("cpu", "meta", "cpu")]
    with FakeTensorMode() as mode:

        def moved(noun, place):
            return _pytree.tree_map_only(torch.Tensor, lambda x: mode.from_tensor(x).to(place), noun)

        there = [moved(p, place) for p, place in zip(proposals, places, strict=True)]
        seen = [moved(o, place) for o, place in zip(observations, places, strict=True)]
        with pytest.raises(RuntimeError, match="device"):
            there[0].score + there[1].score
        counts = OneThreshold()(there, seen, default(DESIGNS[design]))
    assert [count.device for count in counts] == places
