"""A cache in a file: what is loaded is what was saved, bit for bit, or an error says why not."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvest
from families import FAMILIES, RECURRENT, named
from hf_tools import POLICIES, feed, hybrid, same_entries, tokens
from kvest.hf.parallel import Share
from kvest.hf.storage import _digest

STANDING = ("h2o+one_threshold/systematic/inclusion@24, every=8", "snapkv/poisson/inclusion@0.3, every=4, sinks=2")


def continued(model, cache, generator_seed: int = 5) -> torch.Tensor:
    """Logits of a question, and of single tokens far enough for a standing budget to evict again."""
    generator = torch.Generator().manual_seed(generator_seed)
    rows = len(cache.report().seen)
    return torch.cat([feed(model, cache, tokens(generator, n, rows)) for n in (17, *[1] * 13)], dim=1)


@pytest.mark.parametrize("policy", [*POLICIES, *STANDING, "h2o/top_k/none@1.0"])
@pytest.mark.parametrize("tail", [0, 5])
def test_decoding_after_a_reload_is_decoding_without(tiny_model, generator, tmp_path, policy, tail):
    """Fault 15: bit for bit, with room to append and without, before and after an eviction."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, policy, seed=11)
    feed(model, cache, tokens(generator, 61))
    for _ in range(tail):
        feed(model, cache, tokens(generator, 1))
    cache.save(tmp_path / "document.kvest")
    loaded = kvest.EvictionCache.load(tmp_path / "document.kvest", model)
    assert loaded.policy == cache.policy
    before, after = cache.report(), loaded.report()
    same_entries(after, 0, before, 0, tolerance=0.0)
    assert (after.seed, after.full_bytes) == (11, before.full_bytes)
    assert torch.equal(continued(model, loaded), continued(model, cache))
    same_entries(loaded.report(), 0, cache.report(), 0, tolerance=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_shapes_of_batch(tiny_model, generator, tmp_path, dtype):
    """Two rows, one of them padded, after a second turn with padding inside."""
    model = tiny_model().to(dtype)
    cache = kvest.EvictionCache(model, STANDING[0])
    mask = torch.ones(2, 47, dtype=torch.int64)
    mask[1, :11] = 0
    feed(model, cache, tokens(generator, 47, rows=2), mask)
    more = torch.ones(2, 9, dtype=torch.int64)
    more[0, :4] = 0
    mask = torch.cat([mask, more], dim=1)
    feed(model, cache, tokens(generator, 9, rows=2), mask)
    cache.save(tmp_path / "c")
    loaded = kvest.EvictionCache.load(tmp_path / "c", model)
    for row in range(2):
        same_entries(loaded.report(), row, cache.report(), row, tolerance=0.0)
    assert loaded.report().kept_bytes == cache.report().kept_bytes
    after = tokens(generator, 21, rows=2)
    mask = torch.cat([mask, torch.ones(2, 21, dtype=torch.int64)], dim=1)
    assert torch.equal(feed(model, loaded, after, mask), feed(model, cache, after, mask))


@pytest.mark.parametrize("prompt", [9, 61])
def test_bounded_layers_are_saved_too(generator, tmp_path, prompt):
    model = hybrid()
    cache = kvest.EvictionCache(model, POLICIES[1])
    feed(model, cache, tokens(generator, prompt))
    cache.save(tmp_path / "c")
    loaded = kvest.EvictionCache.load(tmp_path / "c", model)
    assert torch.equal(continued(model, loaded), continued(model, cache))


@pytest.mark.parametrize("name", named(*RECURRENT, "gpt_oss"))
def test_layers_of_other_kinds_are_saved_too(generator, tmp_path, name):
    """Recurrent states and convolutions, and what is read into them afterwards; heads with sinks."""
    model = FAMILIES[name]()
    cache = kvest.EvictionCache(model, POLICIES[1])
    feed(model, cache, tokens(generator, 41))
    cache.save(tmp_path / "c")
    loaded = kvest.EvictionCache.load(tmp_path / "c", model)
    for _ in range(3):
        ids = tokens(generator, 1)
        assert torch.equal(feed(model, loaded, ids), feed(model, cache, ids))


def test_a_file_serves_another_object_of_the_same_model(tiny_model, generator, tmp_path):
    """As in a new process: nothing of the first model is needed."""
    first, second = tiny_model(), tiny_model()
    cache = kvest.EvictionCache(first, POLICIES[0])
    feed(first, cache, tokens(generator, 61))
    cache.save(tmp_path / "c")
    want = continued(first, cache)
    assert torch.equal(continued(second, kvest.EvictionCache.load(tmp_path / "c", second)), want)


def test_an_empty_cache_and_one_saved_in_a_branch(tiny_model, generator, tmp_path):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[1])
    cache.save(tmp_path / "empty")
    assert kvest.EvictionCache.load(tmp_path / "empty", model).report().kept.numel() == 0
    feed(model, cache, tokens(generator, 61))
    with cache.branch():
        feed(model, cache, tokens(generator, 5))
        cache.save(tmp_path / "branch")
        want = continued(model, cache)
    assert torch.equal(continued(model, kvest.EvictionCache.load(tmp_path / "branch", model)), want)


def test_room_to_append_is_loaded_as_well(tiny_model, generator, tmp_path):
    """What a long branch has made room for does not grow again after a reload."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 61))
    with cache.branch():
        feed(model, cache, tokens(generator, 200))
    cache.save(tmp_path / "c")
    loaded = kvest.EvictionCache.load(tmp_path / "c", model)
    places = [layer.store.keys.data_ptr() for layer in loaded.layers]
    assert torch.equal(continued(model, loaded), continued(model, cache))
    assert loaded.report().kept_bytes == cache.report().kept_bytes
    assert [layer.store.keys.data_ptr() for layer in loaded.layers] == places


@pytest.fixture
def saved(tiny_model, generator, tmp_path) -> Path:
    model = tiny_model()
    cache = kvest.EvictionCache(model, "snapkv/systematic/inclusion@0.25, every=32", seed=7)
    feed(model, cache, tokens(generator, 61))
    cache.save(tmp_path / "document.kvest", title="A speech", tokens=[1, 2, 3])
    return tmp_path / "document.kvest"


def test_the_header_is_described_and_read_without_the_tensors(saved):
    header = kvest.cache_header(saved)
    assert header.policy == "snapkv/systematic/inclusion@0.25, every=32"
    assert (header.seed, header.seen, header.dtype) == (7, [61], "float32")
    assert header.model.startswith("LlamaForCausalLM")
    assert header.kvest == kvest.__version__
    assert header.notes == {"title": "A speech", "tokens": [1, 2, 3]}


def refused(path: Path, model, *words: str) -> None:
    with pytest.raises(kvest.CacheFileError) as error:
        kvest.EvictionCache.load(path, model)
    assert str(path) in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("size", [0, 5, 500, -1, -1000])
def test_a_file_that_is_cut_off_is_refused(tiny_model, saved, size):
    whole = saved.read_bytes()
    saved.write_bytes(whole[:size])
    refused(saved, tiny_model(), "cut off")


@pytest.mark.parametrize("where", [0.5, 0.75, 0.999])
def test_a_file_in_which_one_bit_differs_is_refused(tiny_model, saved, where):
    whole = bytearray(saved.read_bytes())
    whole[int(where * len(whole))] ^= 1
    saved.write_bytes(whole)
    refused(saved, tiny_model(), "checksum")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 8}, "checksum"),
        ({"policy": "snapkv/systematic/inclusion@0.5"}, "checksum"),
    ],
)
def test_a_header_that_was_edited_is_refused(tiny_model, saved, change, word):
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    metadata["header"] = json.dumps({**json.loads(metadata["header"]), **change}, sort_keys=True)
    save_file(load_file(saved), saved, metadata=metadata)
    refused(saved, tiny_model(), word)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"format": "other"}, "no kvest cache"), ({"version": "2"}, "has format 2"), ({"header": "{"}, "checksum")],
)
def test_another_format_is_refused(tiny_model, saved, change, word):
    with safe_open(saved, framework="pt") as file:
        metadata = {**file.metadata(), **change}
    save_file(load_file(saved), saved, metadata=metadata)
    refused(saved, tiny_model(), word)


def test_foreign_files_are_refused(tiny_model, tmp_path):
    model = tiny_model()
    text, folder, missing = tmp_path / "a.txt", tmp_path / "folder", tmp_path / "nothing"
    text.write_text("not a cache " * 50)
    folder.mkdir()
    refused(text, model, "no safetensors file")
    refused(folder, model, "no such file")
    refused(missing, model, "no such file")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", model, "no kvest cache")


def test_another_model_is_refused(tiny_model, saved):
    refused(saved, tiny_model(layers=2), "whose config differs", "LlamaForCausalLM")
    refused(saved, tiny_model(seed=1), "other weights")
    finetuned = tiny_model()
    finetuned.model.layers[1].mlp.down_proj.weight.data += 0.01
    refused(saved, finetuned, "other weights")


def test_another_dtype_is_refused(tiny_model, saved):
    refused(saved, tiny_model().to(torch.bfloat16), "float32", "bfloat16", "dtype=torch.float32")


def test_a_write_that_fails_leaves_the_old_file(tiny_model, generator, saved):
    old = saved.read_bytes()
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 61))
    with pytest.raises(ValueError, match="plain values"):
        cache.save(saved, title=object())
    with pytest.raises(OSError, match="no folder"):
        cache.save(saved.parent / "nowhere" / "c")
    with pytest.raises(OSError):  # a folder cannot be replaced by a file  # noqa: PT011
        cache.save(saved.parent)
    assert saved.read_bytes() == old
    assert os.listdir(saved.parent) == [saved.name]


def test_a_cache_in_the_middle_of_a_failed_pass_is_not_saved(tiny_model, generator, tmp_path):
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    feed(model, cache, tokens(generator, 41))

    def fail(*_: object) -> None:
        raise InterruptedError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        feed(model, cache, tokens(generator, 5))
    hook.remove()
    with pytest.raises(RuntimeError, match=r"did not finish: call cache.reset\(\)"):
        cache.save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_share_of_the_heads_is_not_saved(tiny_model, tmp_path):
    """One process's file would be read as the whole cache."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, POLICIES[0])
    cache.session.share = Share(rank=0, size=2, heads=4)
    with pytest.raises(ValueError, match=r"split over processes.*in one process"):
        cache.save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_file_that_changes_later_does_not_change_the_cache(tiny_model, generator, saved):
    """Nothing of a loaded cache is a view of the file."""
    model = tiny_model()
    loaded = kvest.EvictionCache.load(saved, model)
    want = continued(model, copy.deepcopy(loaded))
    with open(saved, "rb+") as file:
        file.write(bytes(saved.stat().st_size))
    assert torch.equal(continued(model, loaded), want)


def test_a_file_has_the_mode_of_any_new_file(tiny_model, tmp_path):
    """A document that others may not read does not become readable in its cache."""
    model = tiny_model()
    before = os.umask(0o077)
    try:
        kvest.EvictionCache(model, POLICIES[0]).save(tmp_path / "c")
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o600


def test_a_header_that_does_not_describe_the_tensors_is_refused(tiny_model, saved):
    """Even one whose checksum is right; and what it says of other things than the state is not read."""
    model = tiny_model()
    tensors = load_file(saved)
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["header"])

    def write(**changes: object) -> None:
        text = json.dumps({**header, **changes}, sort_keys=True)
        save_file(tensors, saved, metadata={**metadata, "header": text, "sha256": _digest(text, tensors)})

    write(layers=header["layers"][:2])
    refused(saved, model, "its layers are EvictionLayer, EvictionLayer (")
    write(session={})
    refused(saved, model, "does not describe its tensors")
    write(layers=[{"kind": "EvictionLayer", "columns": 61} for _ in header["layers"]])
    refused(saved, model, "does not describe its tensors")
    write(session={**header["session"], "policy": "other"})
    assert str(kvest.EvictionCache.load(saved, model).policy) == header["policy"]


def test_a_copy_of_a_loaded_cache_is_a_cache(tiny_model, saved):
    model = tiny_model()
    loaded = kvest.EvictionCache.load(saved, model)
    assert torch.equal(continued(model, copy.deepcopy(loaded)), continued(model, loaded))
