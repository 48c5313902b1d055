"""Independent twins of the stand-ins in float64: a loop over entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference import Head, dot, mean, unit

Entry = tuple[list[float], list[float], float]
"""Key, value, log weight."""


def mean_query(a: Head, rows: int) -> list[float]:
    """Over the group and the last `rows` queries of this row."""
    return mean([a.q[g][j] for g in a.groups for j in a.asked[-rows:]])


def weighted_mean(weights: Sequence[float], vectors: Sequence[Sequence[float]]) -> list[float]:
    return [dot(weights, column) / sum(weights) for column in zip(*vectors, strict=True)]


def squared(x: Sequence[float], y: Sequence[float]) -> float:
    return sum((p - q) ** 2 for p, q in zip(x, y, strict=True))


def clusters(a: Head, entries: dict[int, float], count: int, iterations: int) -> list[list[int]]:
    """Lloyd's algorithm on these slots and their weights."""
    order = list(entries)
    centres = [a.k[order[(2 * c + 1) * len(entries) // (2 * count)]] for c in range(count)]

    def assigned() -> list[list[int]]:
        members: list[list[int]] = [[] for _ in centres]
        for i in entries:
            members[min(range(count), key=lambda c: squared(a.k[i], centres[c]))].append(i)
        assert all(members), "the twin does not know what to do with an empty cluster"
        return members

    found = assigned()
    for _ in range(iterations):
        centres = [weighted_mean([entries[i] for i in part], [a.k[i] for i in part]) for part in found]
        found = assigned()
    return found


def centroids(a: Head, kept: set[int], count: int, share: float, rows: int, iterations: int) -> list[Entry]:
    """The made entries of one head; `kept` are the slots that stay."""
    mu = mean_query(a, rows)
    made = []
    evicted = [i for i in a.entries if i not in kept]
    weights = {i: math.exp(a.l[i]) * (1.0 if a.positions[i] < 0 else share) for i in evicted}
    for part in clusters(a, weights, count, iterations):
        mass = [weights[i] * math.exp(a.o.scale * dot(mu, a.k[i])) for i in part]
        key = weighted_mean(mass, [a.k[i] for i in part])
        value = weighted_mean(mass, [a.v[i] for i in part])
        made.append((key, value, math.log(sum(mass)) - a.o.scale * dot(mu, key)))
    return made


def sums(q: Sequence[float], scale: float, entries: Sequence[Entry]) -> list[float]:
    """The numerator of attention, and its denominator behind it."""
    masses = [math.exp(scale * dot(q, k) + w) for k, _, w in entries]
    return [*(dot(masses, column) for column in zip(*(v for _, v, _ in entries), strict=True)), sum(masses)]


def whole(a: Head) -> list[Entry]:
    return [(a.k[i], a.v[i], a.l[i]) for i in a.entries]


def merge(a: Head, kept: set[int], threshold: float | None, keys: bool) -> dict[int, tuple[list[float], list[float]]]:
    """Key and value of every kept slot: each evicted entry folded into the kept one with the nearest key."""
    best: dict[int, tuple[float, int]] = {}
    for i in a.entries:
        if i not in kept:
            best[i] = max((dot(unit(a.k[i]), unit(a.k[j])), j) for j in kept)
    least = sum(u for u, _ in best.values()) / len(best) if threshold is None else threshold
    out = {}
    for j in kept:
        members = {i: u for i, (u, nearest) in best.items() if nearest == j and u >= least}
        weights = [math.e * math.exp(a.l[j]), *(math.exp(u + a.l[i]) for i, u in members.items())]
        both = [weighted_mean(weights, [x[j], *(x[i] for i in members)]) for x in (a.k, a.v)]
        out[j] = (both[0] if keys else a.k[j], both[1])
    return out


def moments(a: Head, gone: set[int], mu: Sequence[float], q: Sequence[float]) -> list[float]:
    """Numerator and denominator of the entries `gone`, to first order at `mu`."""
    scale, order = a.o.scale, sorted(gone)
    mass = [math.exp(scale * dot(mu, a.k[i]) + a.l[i]) for i in order]
    n, shift = sum(mass), [x - y for x, y in zip(q, mu, strict=True)]
    key, value = (weighted_mean(mass, [x[i] for i in order]) for x in (a.k, a.v))
    out = list(value)
    for weight, i in zip(mass, order, strict=True):
        along = scale * dot([x - y for x, y in zip(a.k[i], key, strict=True)], shift)
        out = [o + weight / n * (x - y) * along for o, x, y in zip(out, a.v[i], value, strict=True)]
    total = n * math.exp(scale * dot(shift, key))
    return [*(total * x for x in out), total]


def recall(
    queries: Sequence[Sequence[Sequence[float]]],
    seen: Sequence[int],
    held: Sequence[Entry],
    gone: Sequence[Entry],
    scale: float,
    reuse: float,
    below: float,
) -> tuple[list[list[list[float]]], int]:
    """Outputs of `queries[j][g]`, one after the other, and how often `gone` was brought back.

    Query j sees the first `seen[j]` entries that are held.
    """
    reference: Sequence[Sequence[float]] | None = None
    outputs, times = [], 0
    for mine, count in zip(queries, seen, strict=True):
        near = [
            0.0 if reference is None else dot(unit(x), unit(y)) for x, y in zip(mine, reference or mine, strict=True)
        ]
        asked = reference is None or min(near) < below
        if asked:
            reference, times = mine, times + 1
        assert reference is not None
        out = []
        for q, last, similar in zip(mine, reference, near, strict=True):
            total = sums(q, scale, held[:count])
            if asked or similar > reuse:
                total = [x + y for x, y in zip(total, sums(last, scale, gone), strict=True)]
            out.append([x / total[-1] for x in total[:-1]])
        outputs.append(out)
    return outputs, times
