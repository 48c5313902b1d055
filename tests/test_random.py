"""Named randomness: uniform, different for every part of the name, the same wherever it is computed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvest.random import Stream
from kvest.sample import Poisson, Systematic, WithReplacement
from kvest.types import Proposal

INDEX = torch.arange(4999).expand(3, 5, 4999)


def test_uniform_numbers_are_uniform():
    """Kolmogorov-Smirnov over positions for 2 seeds, 3 layers, 3 rounds and 5 heads, and over seeds, layers and heads.

    90 + 3 comparisons at sqrt(n) D < 2.6, passed by chance but for 2 exp(-2 * 2.6^2) = 2.7e-6 each: 2.5e-4 in all.
    """

    def distance(u: torch.Tensor) -> float:
        n = u.numel()
        ordered, steps = u.flatten().sort().values, torch.arange(n, dtype=torch.float64)
        return float(torch.maximum(ordered - steps / n, (steps + 1) / n - ordered).max()) * math.sqrt(n)

    for seed, layer in itertools.product((0, 20250131), (0, 1, 31)):
        u = Stream(seed, layer, [0, 1, 7]).uniform(INDEX)
        assert u.dtype == torch.float64
        assert ((u >= 0) & (u < 1)).all()
        assert all(distance(x) < 2.6 for x in u.flatten(0, 1))
    at = torch.zeros(1, 1, 1, dtype=torch.int64)
    assert distance(torch.stack([Stream(seed, 0, [0]).uniform(at) for seed in range(499)])) < 2.6
    assert distance(torch.stack([Stream(0, layer, [0]).one(at) for layer in range(499)])) < 2.6
    assert distance(Stream(0, 0, [0]).one(at.expand(1, 4999, 1))) < 2.6


def test_streams_of_different_names_are_unrelated():
    """Seeds, layers, heads, rounds and neighbouring positions: pairwise correlation within 5.5 standard errors.

    48 streams and the same shifted by one position, 4,560 pairs at 3.8e-8: passed by chance but for 1.8e-4.
    """
    names = itertools.product((0, 1, -1, 2**40), (0, 1))
    u = torch.cat([Stream(seed, layer, [0, 1, 2]).uniform(INDEX[:, :2]).flatten(0, 1) for seed, layer in names])
    both = torch.cat([u[:, 1:], u[:, :-1]])
    correlation = torch.corrcoef(both) - torch.eye(len(both))
    assert correlation.abs().max() * math.sqrt(both.shape[1]) < 5.5


def test_a_number_depends_on_its_name_alone():
    """Not on the batch, on padding in front, on the order of positions, or on which heads are held here."""
    whole = Stream(11, 3, [0, 1, 4]).uniform(INDEX)
    assert torch.equal(Stream(11, 3, [4]).uniform(INDEX[:1]), whole[2:])
    assert torch.equal(Stream(11, 3, [0, 1, 4], first_head=2).uniform(INDEX[:, :2]), whole[:, 2:4])
    some = torch.tensor([4000, 17, 17, 0])
    assert torch.equal(Stream(11, 3, [0, 1, 4]).uniform(some.expand(3, 5, 4)), whole[..., some])
    one = Stream(11, 3, [0, 1, 4]).one(INDEX)
    assert one.shape == (3, 5, 1)
    assert torch.equal(Stream(11, 3, [1], first_head=4).one(INDEX[:1, :1, 5:9]), one[1:2, 4:])
    assert not torch.isin(one, whole).any()


def test_the_numbers_are_those_of_every_release():
    """Same seed, same cache: SplitMix64's finaliser over (seed, layer, head, round, index), in plain integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, layer, head, turn, index in itertools.product((0, 7, -3), (0, 5), (0, 2), (0, 9), (0, 1, 12345)):
        x = mix((seed * golden + 1) & mask)
        for name in (layer, head, turn, index):
            x = mix((x + (name + 1) * golden) & mask)
        got = Stream(seed, layer, [turn], first_head=head).uniform(torch.tensor([[[index]]]))
        assert got.item() == (x >> 11) * 2.0**-53


@pytest.mark.parametrize("design", [Poisson(), Systematic(), WithReplacement()], ids=repr)
def test_keep_frequencies_are_the_inclusion_probabilities(design):
    """Over 8 seeds, 5 heads and 250 rounds: each of 13 entries within 5 binomial standard errors.

    39 comparisons for the three designs, passed by chance but for 5.7e-7 each: 2.2e-5 in all. Entries that are kept
    independently also come in pairs as often as they should: 78 comparisons more for Poisson.
    """
    score = torch.tensor([0.5, 2.0, 0.1, 1.0, 3.1, 0.7, 0.2, 1.3, 0.9, 0.4, 0.05, 0.6, 1.1]).expand(250, 5, 13)
    valid, positions = torch.ones(250, 5, 13, dtype=torch.bool), torch.arange(13).expand(250, 5, 13) * 3 + 1
    counts = torch.full((250, 5), 5)
    made = Proposal(score, torch.zeros_like(valid))
    draws = [design(made, valid, counts, positions, Stream(seed, 2, range(250))) for seed in range(8)]
    keep = torch.cat([draw.keep for draw in draws]).flatten(0, 1).double()
    pi, n = draws[0].inclusion[0, 0], len(keep)
    assert ((keep.mean(0) - pi).abs() <= 5 * (pi * (1 - pi) / n).sqrt() + 1e-12).all()
    if isinstance(design, Poisson):
        both = (keep.T @ keep / n)[~torch.eye(13, dtype=torch.bool)]
        expected = torch.outer(pi, pi)[~torch.eye(13, dtype=torch.bool)]
        assert ((both - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt()).all()


def test_heads_layers_and_rounds_keep_different_entries():
    """The same scores everywhere, yet no two heads of 2 layers and 2 rounds keep the same 20 of 101 entries."""
    valid, positions = torch.ones(2, 5, 101, dtype=torch.bool), torch.arange(101).expand(2, 5, 101)
    made = Proposal(torch.ones(2, 5, 101), torch.zeros_like(valid))
    kept = set()
    for layer in range(2):
        keep = Poisson()(made, valid, torch.full((2, 5), 20), positions, Stream(0, layer, [0, 1])).keep
        kept |= {tuple(x.tolist()) for x in keep.flatten(0, 1)}
    assert len(kept) == 20
