"""Independent twins in float64 of wrappers, designs and allocations."""

from __future__ import annotations

import math
from collections.abc import Callable

from reference import Head, Scores, protected


def sharp(a: Head, of: Callable[[Head], Scores], c: float) -> Scores:
    inner = of(a)
    top = max(inner.values())
    return {i: top ** (1 - c) * x**c for i, x in inner.items()}


def chunked(a: Head, of: Callable[[Head], Scores], size: int, layer: bool) -> Scores:
    heads = [Head(a.o, a.row, h) for h in range(a.o.keys.shape[1])] if layer else [a]
    by_position = [{one.positions[i]: x for i, x in of(one).items()} for one in heads]
    inner = {i: sum(x.get(a.positions[i], 0.0) for x in by_position) / len(heads) for i in a.entries}
    out = {}
    for i in a.entries:
        chunk = [n for n in a.entries if a.positions[n] // size == a.positions[i] // size]
        out[i] = sum(inner[n] for n in chunk) / len(chunk)
    return out


class WorstCase(Head):
    """A head whose sum over queries, and mean over the group, is the largest term."""

    def __init__(self, a: Head) -> None:
        super().__init__(a.o, a.row, a.head)

    def attended(self, weights: dict[int, float]) -> Scores:
        seen = [self.p(g, j) for j, weight in weights.items() if weight > 0 for g in self.groups]
        return {i: max(p.get(i, 0.0) for p in seen) for i in self.entries}


def largest_so_far(a: Head) -> Scores:
    """H2O under the maximum: of this round's attention and of what was largest before."""
    now = a.attended(dict.fromkeys(a.asked, 1.0))
    before = a.o.history
    return {i: max(x, 0.0 if before is None else float(before[a.row, a.head, i])) for i, x in now.items()}


def defensive(a: Head, of: Callable[[Head], Scores]) -> Scores:
    return of(WorstCase(a))


def output_norm(a: Head, i: int) -> float:
    """mean_g |W_O v_i|_1"""
    total = 0.0
    for g in a.groups:
        for row in a.o.output[a.head, g].double().tolist():
            total += abs(sum(w * x for w, x in zip(row, a.v[i], strict=True))) / len(a.groups)
    return total


def critical(a: Head, of: Callable[[Head], Scores], eps: float) -> Scores:
    return {i: (x + eps) * output_norm(a, i) for i, x in of(a).items()}


def critical_certain(a: Head, of: Callable[[Head], Scores], first: float) -> Scores:
    """1 for the entries of the first stage."""
    inner, taken = of(a), protected(a)
    rank = sorted((i for i in a.entries if i not in taken), key=inner.__getitem__, reverse=True)
    return dict.fromkeys(rank[: max(0, min(int(first * a.budget), a.budget - len(taken)))], 1.0)


def pyramid(budget: int, always: int, seen: int, layers: int, beta: float) -> list[int]:
    """A line over the layers, its ends as in the paper's code, rounded to the sum budget * layers."""
    free = budget - always
    last = free / beta
    first = 2 * free - last
    if first > seen - always:
        first = seen - always
        last = 2 * free - first
    wanted = (
        [always + (first + last) / 2]
        if layers == 1
        else [always + first - (first - last) * n / (layers - 1) for n in range(layers)]
    )
    counts = [int(w + 1e-9) for w in wanted]
    order = sorted(range(layers), key=lambda n: round(wanted[n] - counts[n], 6), reverse=True)
    for n in order[: budget * layers - sum(counts)]:
        counts[n] += 1
    return counts


def ranked_together(scores: list[list[float]], total: int, least: list[int]) -> list[int]:
    """AdaKV for top-k: the `least` best of each head, then the best of all the others, whatever the head."""
    order = [sorted(x, reverse=True) for x in scores]
    counts = [min(n, len(x)) for n, x in zip(least, scores, strict=True)]
    rest = [(x, head) for head, xs in enumerate(order) for x in xs[counts[head] :]]
    for _, head in sorted(rest, reverse=True)[: total - sum(counts)]:
        counts[head] += 1
    return counts


def entropy(scores: list[float]) -> float:
    """-sum y log y / log n of scores normalised to sum to 1."""
    total = sum(scores)
    return -sum(x / total * math.log(x / total) for x in scores if x > 0) / math.log(len(scores))


def filled(weights: list[float], total: int, most: list[int]) -> list[float]:
    """min(most, c weight) summing to total, c by bisection."""
    low, high = 0.0, 1e9 * max(most)
    for _ in range(300):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(m, c * w) for m, w in zip(most, weights, strict=True)) < total else (low, c)
    return [min(float(m), high * w) for m, w in zip(most, weights, strict=True)]
