"""Randomness is named: by seed, layer, head, round and position, and by nothing else."""

from __future__ import annotations

import pytest
import torch

import kvest
from hf_tools import feed, same_entries, tokens

RANDOM = ("uniform/systematic/inclusion@0.3", "h2o/poisson/inclusion@0.3", "snapkv/with_replacement/counts@0.3")


def held(report):
    """Positions as plain numbers, [l][b][h]."""
    return [[[where.tolist() for where in row] for row in layer] for layer in report.positions]


@pytest.mark.parametrize("policy", RANDOM)
def test_the_same_seed_gives_the_same_cache_and_another_seed_another(tiny_model, generator, policy):
    model, prompt = tiny_model(), tokens(generator, 131)
    reports = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(reports))  # the global generator has no say
        cache = kvest.EvictionCache(model, policy, seed=seed)
        feed(model, cache, prompt)
        reports.append(cache.report())
    assert [report.seed for report in reports] == [3, 3, 4]
    same_entries(reports[0], 0, reports[1], 0, 0)
    assert held(reports[0]) != held(reports[2])


def test_a_deterministic_design_has_no_use_for_the_seed(tiny_model, generator):
    model, prompt = tiny_model(), tokens(generator, 131)
    reports = []
    for seed in (3, 4):
        cache = kvest.EvictionCache(model, "snapkv/top_k/none@0.3", seed=seed)
        feed(model, cache, prompt)
        reports.append(cache.report())
    same_entries(*[part for report in reports for part in (report, 0)], 0)


def test_layers_and_heads_draw_different_entries(tiny_model, generator):
    """Fault 19: All scores are equal, so that only the random numbers can differ."""
    model = tiny_model(heads=5, kv_heads=5)
    cache = kvest.EvictionCache(model, "uniform/poisson/inclusion@0.3")
    feed(model, cache, tokens(generator, 131))
    sets = [tuple(head) for layer in held(cache.report()) for row in layer for head in row]
    assert len(set(sets)) == 15


def test_a_second_round_draws_new_numbers(tiny_model, generator):
    """A coin of 0.3 and then one of 0.5: with the first round's numbers again, all that was held would stay."""
    model = tiny_model()
    cache = kvest.EvictionCache(model, "uniform/poisson/inclusion@61, every=2, sinks=0, window=1")
    feed(model, cache, tokens(generator, 199))
    first = set(held(cache.report())[0][0][0])
    feed(model, cache, tokens(generator, 61))
    left = first & set(held(cache.report())[0][0][0])
    assert 0.2 < len(left) / len(first) < 0.8


def test_identical_rows_of_a_batch_draw_the_same(tiny_model, generator):
    model, prompt = tiny_model(), tokens(generator, 131)
    cache = kvest.EvictionCache(model, RANDOM[0])
    feed(model, cache, prompt.expand(3, -1))
    report = cache.report()
    same_entries(report, 0, report, 2, 0)
