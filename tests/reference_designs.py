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


Outcome = tuple[int, ...]


def duel(p: float, q: float) -> list[tuple[float, float, float]]:
    """(probability, p, q) of both results of a duel: one of them ends at 0 or 1, the other holds the rest."""
    s = p + q
    if s <= 1:
        return [(p / s, s, 0.0), (q / s, 0.0, s)] if s > 0 else [(1.0, p, q)]
    return [((1 - q) / (2 - s), 1.0, s - 1), ((1 - p) / (2 - s), s - 1, 1.0)]


def ordered_pivotal(pi: list[float]) -> dict[Outcome, float]:
    """Probability of every sample: the first entry duels with the second, whoever is open with the third, and so on."""
    samples: dict[Outcome, float] = {}

    def go(state: list[float], open_: int, following: int, probability: float) -> None:
        if following == len(pi):
            kept = tuple(i for i, p in enumerate(state) if p > 0.5)
            samples[kept] = samples.get(kept, 0.0) + probability
            return
        for chance, p, q in duel(state[open_], state[following]):
            after = list(state)
            after[open_], after[following] = p, q
            still = following if abs(p - round(p)) < 1e-12 else open_
            go(after, still, following + 1, probability * chance)

    go(list(pi), 0, 1, 1.0)
    return samples


def tournament(pi: list[float], first_wins: Callable[[int, int], bool]) -> tuple[Outcome, dict[tuple[int, int], float]]:
    """(who is kept, the chance of the first of each duel) where `first_wins(round, duel)` decides

    From the last entry backwards; a probability of 0 or 1 takes part with 0 and is decided beforehand.
    """
    n = 1
    while n < len(pi):
        n *= 2
    level = [(i, 0.0 if pi[i] == 1 else pi[i]) for i in reversed(range(len(pi)))] + [(-1, 0.0)] * (n - len(pi))
    kept, chances, turn = {i for i, p in enumerate(pi) if p == 1}, {}, 0
    while len(level) > 1:
        following = []
        for number, ((i, p), (j, q)) in enumerate(zip(level[::2], level[1::2], strict=True)):
            s = p + q
            chance = (p / s if s > 0 else 0.0) if s <= 1 else (1 - q) / (2 - s) if s < 2 else 0.5
            chances[turn, number] = chance
            winner, loser = (i, j) if first_wins(turn, number) else (j, i)
            if s > 1:
                kept.add(winner)
            following.append((winner, s) if s <= 1 else (loser, s - 1))
        level, turn = following, turn + 1
    if level[0][1] > 0.5:
        kept.add(level[0][0])
    return tuple(sorted(kept)), chances


def clustered(
    x: list[float], positions: list[int], size: int, rate: Callable[[list[float]], list[float]]
) -> list[float]:
    """Each entry's inclusion probability, where `rate` gives those of clusters from their scores."""
    names = sorted({p // size for p in positions})
    pi = rate([sum(a for a, p in zip(x, positions, strict=True) if p // size == name) for name in names])
    return [pi[names.index(p // size)] for p in positions]
