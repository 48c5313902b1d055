"""Load: hundreds of turns on one cache, many caches on one model, several threads at once."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvest
from hf_tools import feed, living_bytes, same_entries, tokens

STANDING = (
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@61, every=7",
    "snapkv(11)/top_k/none@61, every=7",
)
SERVED = (
    *STANDING,
    "uniform/poisson/inclusion@0.4",
    "with_certain(h2o, by=keydiff, share=0.2)/systematic/tempered(auto)@0.5, every=3",
    "capkv/with_replacement/counts@0.3",
)
"""What the caches of one model may be asked for: each with a policy, a seed, and a text of its own."""


@pytest.fixture
def uncollected():
    """Garbage in cycles stays, and what was there before is not counted."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("policy", STANDING)
def test_two_hundred_turns_hold_the_same_bytes_to_the_byte(tiny_model, generator, uncollected, policy):
    """Turns of 2 to 9 tokens and answers of two: after each question the report's bytes are the same, and so are
    those of all tensors alive, counted from outside."""
    model = tiny_model(heads=6, kv_heads=2, layers=1)
    cache = kvest.EvictionCache(model, policy)
    feed(model, cache, tokens(generator, 67))
    weights = living_bytes() - cache.report().kept_bytes  # of the model, and what a first pass leaves behind
    held = []
    for turn in range(200):
        feed(model, cache, tokens(generator, 2 + turn % 8))
        held.append(cache.report().kept_bytes)
        if turn % 66 == 1:
            assert living_bytes() == weights + held[-1]
        for _ in range(2):
            feed(model, cache, tokens(generator, 1))
    report = cache.report()
    assert len(set(held)) == 1
    assert report.seen.tolist() == [67 + 200 * 2 + sum(2 + turn % 8 for turn in range(200))]
    assert report.evictions == [201]
    assert report.kept.double().mean() == 63
    assert report.kept_bytes < report.full_bytes / 15


def conversation(generator: torch.Generator, number: int) -> tuple[str, list[torch.Tensor], torch.Tensor]:
    """(policy, pieces, mask of all columns): a prompt of its own length, some tokens, a question, some tokens; every
    third is a batch of two with padding in front."""
    prompt, rows = 37 + 5 * (number % 11), 1 + (number % 3 == 0)
    pieces = [tokens(generator, n, rows) for n in (prompt, 1, 1, 2 + number % 7, 1, 1, 1)]
    mask = torch.ones(rows, sum(piece.shape[1] for piece in pieces), dtype=torch.long)
    mask[-1, : 3 * (rows - 1)] = 0
    return SERVED[number % len(SERVED)], pieces, mask


def steps(model, cache, pieces, mask):
    """Logits of one piece after the other."""
    stop = 0
    for piece in pieces:
        stop += piece.shape[1]
        yield feed(model, cache, piece, mask[:, :stop])


def assert_same(report: kvest.Report, other: kvest.Report) -> None:
    for row in range(len(report.seen)):
        same_entries(report, row, other, row, 0)
    assert report.kept_bytes == other.kept_bytes


def test_fifty_caches_interleaved_on_one_model_equal_fifty_separate_runs(tiny_model, generator):
    """Bit for bit, in another order in every round."""
    model = tiny_model(heads=6, kv_heads=2, layers=2)
    spoken = [conversation(generator, number) for number in range(50)]
    caches = [kvest.EvictionCache(model, policy, seed) for seed, (policy, _, _) in enumerate(spoken)]
    running = [steps(model, cache, *text) for cache, (_, *text) in zip(caches, spoken, strict=True)]
    logits: list[list[torch.Tensor]] = [[] for _ in caches]
    for _ in range(len(spoken[0][1])):
        for number in torch.randperm(50, generator=generator).tolist():
            logits[number].append(next(running[number]))
    for number, (policy, *text) in enumerate(spoken):
        alone = kvest.EvictionCache(model, policy, number)
        want = list(steps(model, alone, *text))
        assert all(torch.equal(a, b) for a, b in zip(logits[number], want, strict=True))
        assert_same(caches[number].report(), alone.report())
    assert len({cache.report().kept_bytes for cache in caches}) > 20


@pytest.fixture
def restless():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_four_threads_on_one_model_equal_the_same_runs_one_after_the_other(tiny_model, generator, restless):
    """Caches are made, filled and asked at once, bit for bit; the first ones attach the model at once, too."""
    spoken = [conversation(generator, number) for number in range(12)]
    model = tiny_model(heads=6, kv_heads=2, layers=2)
    together = threading.Barrier(4)

    def serve(number):
        policy, *text = spoken[number]
        if number < 4 and threading.current_thread() is not threading.main_thread():
            together.wait(timeout=60)
        cache = kvest.EvictionCache(model, policy, number)
        return list(steps(model, cache, *text)), cache.report()

    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        threaded = list(pool.map(serve, range(12)))
    assert model.config._attn_implementation == "kvest_sdpa"
    for number, (logits, report) in enumerate(threaded):
        want, alone = serve(number)
        assert all(torch.equal(a, b) for a, b in zip(logits, want, strict=True))
        assert_same(report, alone)


def test_threads_that_generate_at_once_write_what_they_write_alone(tiny_model, generator, restless):
    model = tiny_model(heads=6, kv_heads=2, layers=2)
    prompts = [tokens(generator, 71 + 6 * number) for number in range(4)]

    def answer(number):
        cache = kvest.EvictionCache(model, SERVED[number], number)
        mask = torch.ones_like(prompts[number])
        out = model.generate(
            prompts[number], attention_mask=mask, past_key_values=cache, max_new_tokens=20, do_sample=False
        )
        return out, cache.report()

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        threaded = list(pool.map(answer, range(4)))
    for number, (out, report) in enumerate(threaded):
        want, alone = answer(number)
        assert torch.equal(out, want)
        assert_same(report, alone)
