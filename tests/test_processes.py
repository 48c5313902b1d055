"""Heads split over two processes: the same cache, the same logits and the same errors as in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

import process_cases as cases
from hf_tools import hybrid, same_entries, sharpen
from kvest.hf import calibration
from kvest.hf.fingerprint import identity, weight_samples
from kvest.hf.parallel import Share

TIMEOUT_S = 180
"""Many times what it takes: two processes that wait for each other must not stop a test run."""

CASES = [*(("llama", policy) for policy in (*cases.ONCE, *cases.STANDING)), ("olmo2", cases.STANDING[0])]
CASES += [("by torch", cases.ONCE[1])]


def olmo2():
    """Its keys are normed over all heads, so that under tensor parallelism every process holds all of them."""
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return sharpen(Olmo2ForCausalLM(config).eval())


@pytest.fixture(scope="module")
def models(tiny_model):
    return {
        "llama": tiny_model(heads=8, kv_heads=4),
        "olmo2": olmo2(),
        "gemma3": hybrid(),
        "three": tiny_model(heads=6, kv_heads=3, layers=1),
    }


@pytest.fixture(scope="module")
def tables(models, tmp_path_factory):
    """A user's cache directory, with a table of importance for the llama."""
    folder = tmp_path_factory.mktemp("cache") / "calibration"
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    about = calibration.About("damage", "llama", identity(models["llama"])["config"], [], 0, None, 0, [], {})
    importance = (2 * torch.randn(3, 4, generator=generator)).exp()
    table = calibration.Calibration(about, importance, None, weight_samples(models["llama"]))
    calibration.save(table, folder / "llama.safetensors")
    return folder.parent


@pytest.fixture(scope="module")
def ranks(models, tables, tmp_path_factory):
    """What both processes saw, in one start of torchrun for all tests."""
    folder = tmp_path_factory.mktemp("processes")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*launch, str(here / "process_cases.py"), str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "KVEST_CACHE": str(tables),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends the processes that it started
        said, _ = process.communicate(timeout=60)
        pytest.fail(f"two processes did not end within {TIMEOUT_S} s:\n{said}")
    assert process.returncode == 0, said
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def agree(mine, theirs):
    """Reports and logits of two processes and of one."""
    for ours, alone in zip(mine["reports"], theirs["reports"], strict=True):
        for row in range(len(alone.seen)):
            same_entries(ours, row, alone, row, tolerance=1e-4)
    want = theirs["logits"]
    torch.testing.assert_close(mine["logits"], want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("name", "policy"), CASES)
@torch.no_grad()
def test_two_processes_keep_and_compute_what_one_does(name, policy, models, ranks):
    """In a padded batch, over a question and single tokens, and in later rounds."""
    alone = cases.padded_batch(models["llama" if name == "by torch" else name], policy)
    assert max(alone["reports"][-1].evictions) > (policy in cases.STANDING)
    for seen in ranks:
        agree(seen[name][policy], alone)


@torch.no_grad()
def test_two_processes_weigh_heads_as_one_does(models, tables, ranks, monkeypatch):
    """The table is one of all heads; weights that are split cannot be compared, the config decides."""
    monkeypatch.setenv("KVEST_CACHE", str(tables))
    alone = cases.padded_batch(models["llama"], cases.WEIGHED)
    plain = cases.padded_batch(models["llama"], cases.STANDING[0])
    assert not torch.equal(alone["reports"][0].kept, plain["reports"][0].kept)
    for seen in ranks:
        agree(seen["llama"][cases.WEIGHED], alone)


def test_each_process_holds_its_own_heads(ranks):
    """A report is of one process, and asks no other, unless it is to be of all."""
    for policy in cases.ONCE:
        seen = [rank["llama"][policy] for rank in ranks]
        whole = seen[0]["reports"][-1]
        for rank, each in enumerate(seen):
            assert torch.equal(each["own"].kept, whole.kept[:, :, 2 * rank : 2 * rank + 2])
        assert sum(each["own"].kept_bytes for each in seen) == whole.kept_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_budget_of_bytes_is_for_all_processes_together(name, models, ranks):
    """To the byte what one process holds, the windows of bounded layers included; their counters are in each."""
    alone = cases.one_prompt(models[name], cases.IN_BYTES)
    [one] = alone["reports"]
    assert one.kept_bytes <= cases.BYTES < one.full_bytes
    for seen in ranks:
        agree(seen["bytes"][name], alone)
        [report] = seen["bytes"][name]["reports"]
        counters = 8 * (len(report.kept) - len(report.evicted_layers))
        assert one.kept_bytes <= report.kept_bytes <= min(one.kept_bytes + counters, cases.BYTES)
        assert report.full_bytes == one.full_bytes


@torch.no_grad()
def test_generate_gives_the_tokens_of_one_process(models, ranks):
    want = cases.generated(models["llama"], cases.ONCE[1])
    assert len(want) == cases.GENERATED
    assert [seen["generated"] for seen in ranks] == [want, want]


def test_keeping_everything_is_the_stock_cache_of_each_process(ranks):
    assert all(seen["whole"] for seen in ranks)


def test_a_copied_cache_belongs_to_the_same_processes(ranks):
    assert all(seen["bytes"]["llama"]["copied"] for seen in ranks)


def test_heads_that_would_be_cut_are_refused(ranks):
    for seen in ranks:
        assert seen["three heads"].startswith("UnsupportedModel: kvest cannot evict the cache of LlamaForCausalLM")
        assert "3 KV heads cannot be split over 2 processes" in seen["three heads"]


def test_heads_that_nobody_can_name_are_refused():
    """Where a model is split in a way that does not show on its weights, its keys have too few heads."""
    Share(heads=4).check(4)
    with pytest.raises(RuntimeError, match=r"2 KV heads in this process, not 4 of 4.*does not know which"):
        Share(heads=4).check(2)


def test_layers_split_over_processes_are_refused(ranks):
    for seen in ranks:
        assert seen["layers"].startswith("UnsupportedModel: kvest cannot evict the cache of LlamaForCausalLM")
        assert "pipeline parallelism" in seen["layers"]


def test_an_error_in_one_process_is_raised_in_all(ranks):
    """None waits for another that has given up."""
    for seen in ranks:
        assert seen["not finite"].startswith("ValueError: h2o(values=True) gave NaN or infinite scores")
