"""More twins in float64: scores of keys, values and moments, a loop over entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from reference import Head, Scores, dot, mean, norm, protected, rotated, softmax, unit

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def uniform_number(seed: int, layer: int, index: int) -> float:
    x = mix(seed * 0x9E3779B97F4A7C15 + 1 & MASK)
    for part in (layer, 0, 0, index):
        x = mix(x + (part + 1) * 0x9E3779B97F4A7C15 & MASK)
    return (x >> 11) * 2.0**-53


def gaussian(seed: int, layer: int, rows: int, columns: int) -> list[list[float]]:
    """Box and Muller: the radius from the first half of the numbers, the angle from the second."""

    def one(n: int) -> float:
        first, second = uniform_number(seed, layer, n), uniform_number(seed, layer, rows * columns + n)
        return math.sqrt(-2 * math.log(1 - first)) * math.cos(2 * math.pi * second)

    return [[one(row * columns + column) for column in range(columns)] for row in range(rows)]


def times(x: Sequence[float], matrix: Sequence[Sequence[float]]) -> list[float]:
    return [dot(x, column) for column in zip(*matrix, strict=True)]


def minus(x: Sequence[float], y: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(x, y, strict=True)]


def turn(a: Head, position: int) -> tuple[list[float], list[float]]:
    cos, sin = a.o.rotation.at(torch.tensor([position]))
    return cos[0].tolist(), sin[0].tolist()


def back(a: Head, x: Sequence[float], position: int) -> list[float]:
    cos, sin = turn(a, position)
    return rotated(x, cos, [-s for s in sin])


def tokens(a: Head) -> list[int]:
    """Entries that tokens wrote: made ones lie at position -1."""
    return [i for i in a.entries if a.positions[i] >= 0]


def asked_at(a: Head) -> dict[int, int]:
    """The position of each query."""
    return {j: a.seen - len(a.asked) + n for n, j in enumerate(a.asked)}


def value_norm(a: Head) -> Scores:
    return {i: norm(a.v[i]) for i in a.entries}


def value_range(a: Head) -> Scores:
    return {i: max(a.v[i]) - min(a.v[i]) for i in a.entries}


def lagkv(a: Head, lag: int = 128, peer: bool = False) -> Scores:
    sinks = 4 if peer else sum(1 for i in tokens(a) if a.positions[i] < a.o.sinks)
    rest = tokens(a)[sinks:]
    lags = [rest[n : n + lag] for n in range(0, len(rest) - lag + 1, lag)]
    out = dict.fromkeys(a.entries, 1.0)
    if peer and len(lags) < 2:
        return out | {i: n / len(rest) for n, i in enumerate(rest)}
    for own, following in pairwise(lags):
        total = dict.fromkeys(own, 0.0)
        for x in (a.k, a.v):
            columns = [[x[i][c] for i in following] for c in range(len(x[0]))]
            spread = {}
            for i in own:
                normal = torch.tensor(
                    [
                        (value - min(column)) / (max(column) - min(column)) if max(column) > min(column) else 0.0
                        for value, column in zip(x[i], columns, strict=True)
                    ],
                    dtype=torch.float64,
                )
                spread[i] = float(normal.std())
            for i, share in softmax(spread).items():
                total[i] += share
        for i in own:
            below = sum(total[n] < total[i] for n in own)
            out[i] = below / lag if peer else (below + 1) / (lag + 1)
    return out


def expected_attention(
    a: Head, ahead: int = 512, covariance: bool = True, values: bool = True, eps: float = 0.0, peer: bool = False
) -> Scores:
    at = asked_at(a)
    asked = [j for j in a.asked if at[j] >= 4] or list(a.asked)
    later = [turn(a, a.seen + n) for n in range(ahead)]
    cos, sin = mean([c for c, _ in later]), mean([s for _, s in later])
    scored = [i for i in a.entries if not peer or a.positions[i] >= 4]
    total = dict.fromkeys(a.entries, 0.0)
    for g in a.groups:
        plain = [back(a, a.q[g][j], at[j]) for j in asked]
        mu = rotated(mean(plain), cos, sin)
        apart = [rotated(minus(q, mean(plain)), cos, sin) for q in plain]  # k^T Sigma k = mean_j (k . R (q_j - mu))^2
        logits = {i: a.o.scale * dot(mu, a.k[i]) + a.l[i] for i in scored}
        for i in scored if covariance else ():
            logits[i] += a.o.scale**2 / 2 * sum(dot(x, a.k[i]) ** 2 for x in apart) / len(apart)
        for i, p in softmax(logits).items():
            total[i] += p / len(a.groups)
    score = a.by_norm({i: p + eps for i, p in total.items()}, values)
    return score if not peer else {i: x if i in scored else max(score[n] for n in scored) for i, x in score.items()}


def leverage(a: Head, sketch: int = 48, ridge: float = 1e-2, seed: int = 0) -> Scores:
    plain = {i: back(a, a.k[i], a.positions[i]) for i in tokens(a)}
    weights = {i: math.exp(a.l[i]) for i in plain}
    centre = [sum(weights[i] * plain[i][c] for i in plain) / sum(weights.values()) for c in range(len(a.k[0]))]
    x = {i: minus(plain[i], centre) for i in plain}
    if len(centre) > sketch:
        matrix = gaussian(seed, a.o.layer, len(centre), sketch)
        x = {i: [y / math.sqrt(sketch) for y in times(k, matrix)] for i, k in x.items()}
    rows = {i: torch.tensor(k, dtype=torch.float64) for i, k in x.items()}
    width = min(sketch, len(centre))
    gram = ridge * torch.eye(width, dtype=torch.float64) + sum(weights[i] * torch.outer(k, k) for i, k in rows.items())
    return {i: float(k @ torch.linalg.solve(gram, k)) for i, k in rows.items()}


def noncausal(a: Head, chunk: int = 256, peer: bool = False) -> Scores:
    at = asked_at(a)
    oldest = min(at.values()) // chunk
    home = {i: max(a.positions[i] // chunk, oldest) for i in a.entries}
    total = dict.fromkeys(a.entries, 0.0)
    scale = 1.0 if peer else a.o.scale
    padding = range(-1, -1 - (-a.seen % chunk if peer else 0), -1)
    for j in a.asked:
        mine, last = [i for i in a.entries if home[i] == at[j] // chunk], at[j] // chunk == (a.seen - 1) // chunk
        for g in a.groups:
            logits = {i: scale * dot(a.q[g][j], a.k[i]) + a.l[i] for i in mine}
            p = softmax(logits | dict.fromkeys(padding if last else (), 0.0))
            for i in mine:
                total[i] += p[i] / len(a.groups)
    if not peer:
        return a.by_norm(total, True)
    for i in a.entries:
        total[i] += len(padding) / chunk if home[i] == (a.seen - 1) // chunk else 0.0
    raw = a.by_norm(total, True)
    return {i: sum(raw.get(n, 0.0) for n in (i - 1, i, i + 1)) / 3 for i in a.entries}


def standard(x: Scores) -> Scores:
    centre = sum(x.values()) / len(x)
    std = math.sqrt(sum((y - centre) ** 2 for y in x.values()) / len(x))
    return {i: (y - centre) / std for i, y in x.items()}


def compactor(a: Head, blend: float = 0.35, chunk: int = 256, **knobs: Any) -> Scores:
    raw = {i: x for i, x in noncausal(a, chunk).items() if i in tokens(a)}
    near = {i: [raw[n] for n in (i - 1, i, i + 1) if n in raw] for i in raw}
    alone, asked = standard(leverage(a, **knobs)), standard({i: sum(x) / len(x) for i, x in near.items()})
    score = {i: blend * alone[i] + asked[i] for i in raw}
    return {i: x - min(score.values()) for i, x in score.items()}


def compactor_certain(a: Head) -> Scores:
    """1 for the first 8 positions and the last 4, as long as there is room; the first come first."""
    taken = protected(a)
    ends = [i for i in tokens(a) if i not in taken and (a.positions[i] < 8 or a.positions[i] >= a.seen - 4)]
    return dict.fromkeys(ends[: max(0, a.budget - len(taken))], 1.0)


def curdkv(a: Head, rank: int = 20, seed: int = 0, peer: bool = False) -> Scores:
    if not peer:
        key, value = (gaussian(seed, a.o.layer, len(x[0]), rank) for x in (a.k, a.v))
        return {i: (norm(times(a.k[i], key)) * norm(times(a.v[i], value)) / rank) ** 2 for i in a.entries}
    entries, out = tokens(a), {}
    for start in range(0, len(entries), 16):
        window = entries[start : start + 16]
        keys, values = (sum(norm(x[i]) ** 2 for i in window) for x in (a.k, a.v))
        out |= {i: norm(a.k[i]) ** 2 / keys * norm(a.v[i]) ** 2 / values for i in window}
    return {i: 1.0 if i in entries[:4] else x / sum(out.values()) for i, x in out.items()}


def lava(a: Head, window: int = 32, pool: int = 7) -> Scores:
    asked = a.asked[-window:]
    most = dict.fromkeys(a.entries, 0.0)
    for g in a.groups:
        total = dict.fromkeys(a.entries, 0.0)
        for j in asked:
            for i, p in a.p(g, j).items():
                total[i] += p / len(asked)
        most = {i: max(most[i], total[i]) for i in a.entries}
    longest = max(sum(abs(x) for x in a.v[i]) for i in tokens(a))
    near = {i: [most[n] for n in range(i - pool // 2, i + pool // 2 + 1) if n in tokens(a)] for i in tokens(a)}
    return {i: longest * max(near[i]) for i in near}


def capkv_weights(a: Head, form: str, tau: float, ahead: int) -> Scores:
    """The mean weight over the group, of the entries that the form counts."""
    counted = [i for i in tokens(a) if form == "paper" or a.positions[i] >= 4]
    total = dict.fromkeys(counted, 0.0)
    for g in a.groups:
        at = asked_at(a)
        if form == "authors":
            later = [turn(a, a.seen + n) for n in range(ahead)]
            plain = mean([back(a, a.q[g][j], at[j]) for j in a.asked if at[j] >= 4])
            mu = unit(rotated(plain, mean([c for c, _ in later]), mean([s for _, s in later])))
            logs = {i: tau * dot(unit(a.k[i]), mu) + a.l[i] for i in counted}
            logs = {i: x - max(logs.values()) for i, x in logs.items()}
        else:
            mu = mean([a.q[g][j] for j in a.asked])
            logs = {i: tau * dot(a.k[i], mu) + a.l[i] for i in counted}
        for i in counted:
            total[i] += math.exp(logs[i]) / len(a.groups)
    return total


def capacity(rows: dict[int, Tensor], of: Sequence[int]) -> float:
    """log det(I + sum over these rows)"""
    width = len(next(iter(rows.values())))
    return float(torch.logdet(torch.eye(width, dtype=torch.float64) + sum(torch.outer(rows[i], rows[i]) for i in of)))


def capkv_greedy(a: Head, form: str = "authors", tau: float = 5.0, ahead: int = 512) -> Scores:
    """The log-determinant itself, anew for every candidate of every step."""
    weights = capkv_weights(a, form, tau, ahead)
    rows = {i: math.sqrt(w) * torch.tensor(a.v[i], dtype=torch.float64) for i, w in weights.items()}
    apart = protected(a) | (set(tokens(a)) - set(rows))
    chosen, free = [i for i in rows if i in apart], [i for i in rows if i not in apart]
    zero = {**rows, -1: 0 * torch.tensor(a.v[-1], dtype=torch.float64)}
    score = {}

    def growth(i: int) -> float:
        return capacity(zero, [*chosen, i]) - capacity(zero, [*chosen, -1])

    for _ in range(min(len(free), a.budget - len(apart))):
        best = max(free, key=growth)
        score[best] = growth(best)
        free.remove(best)
        chosen.append(best)
    score |= {i: growth(i) for i in free}
    return score | dict.fromkeys(apart, max(score.values(), default=1.0))


def moment_residual(a: Head, window: int = 64) -> Scores:
    asked = a.asked[-window:]
    attention = a.attended({j: 1 / len(asked) for j in asked})
    n = {i: math.exp(a.l[i]) for i in a.entries}
    total = sum(n.values())
    k = [sum(n[i] * a.k[i][c] for i in a.entries) / total for c in range(len(a.k[0]))]
    v = [sum(n[i] * a.v[i][c] for i in a.entries) / total for c in range(len(a.v[0]))]
    slope = [
        [sum(n[i] * (a.v[i][r] - v[r]) * (a.k[i][c] - k[c]) for i in a.entries) / total for c in range(len(k))]
        for r in range(len(v))
    ]
    out = {}
    for i in a.entries:
        said = [v[r] + a.o.scale * dot(slope[r], a.k[i]) for r in range(len(v))]
        out[i] = attention[i] * norm(minus(a.v[i], said))
    return out
