"""Independent twins in float64: every formula as `docs` and docstrings write it, a loop over entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvest.types import Observation

Scores = dict[int, float]


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def norm(x: Sequence[float]) -> float:
    return math.sqrt(dot(x, x))


def unit(x: Sequence[float]) -> list[float]:
    return [a / norm(x) for a in x]


def mean(vectors: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def softmax(logits: Scores) -> Scores:
    top = max(logits.values())
    mass = {i: math.exp(x - top) for i, x in logits.items()}
    return {i: m / sum(mass.values()) for i, m in mass.items()}


class Head:
    """One KV head of one row: `entries` and `asked` are the slots that hold an entry and a query."""

    def __init__(self, o: Observation, row: int, head: int) -> None:
        self.o, self.row, self.head = o, row, head
        self.k, self.v, self.l = (x[row, head].double().tolist() for x in (o.keys, o.values, o.log_weights))
        self.q, self.positions = o.queries[row, head].double().tolist(), o.positions[row, head].tolist()
        self.t, self.groups, slots = len(self.k), range(len(self.q)), o.queries.shape[3]
        self.entries = range(self.t - int(o.lengths[row, head]), self.t)
        self.asked = range(slots - int(o.query_lengths[row]), slots)
        self.seen, self.budget = int(o.seen[row]), int(o.budget[row])
        self.sees = {j: self.t - slots + j for j in self.asked}  # the entry that query j wrote

    def p(self, g: int, j: int, causal: bool = True) -> Scores:
        """p_j(i) of query head g."""
        last = self.sees[j] if causal else self.t
        q = self.q[g][j]
        logits = {i: self.o.scale * dot(q, self.k[i]) + self.l[i] for i in self.entries if i <= last}
        return softmax(logits)

    def attended(self, weights: dict[int, float]) -> Scores:
        """sum_j weight_j mean_g p_j(i)"""
        total = dict.fromkeys(self.entries, 0.0)
        for j, weight in weights.items():
            for g in self.groups:
                for i, p in self.p(g, j).items():
                    total[i] += weight * p / len(self.groups)
        return total

    def output(self, p: Scores) -> list[float]:
        return [sum(x * self.v[i][c] for i, x in p.items()) for c in range(len(self.v[0]))]

    def by_norm(self, score: Scores, values: bool) -> Scores:
        return {i: s * norm(self.v[i]) if values else s for i, s in score.items()}


def score(twin: Callable[..., Scores], o: Observation, **knobs: Any) -> Tensor:
    """A twin's score over all rows and heads; 0 on missing slots."""
    out = torch.zeros(o.positions.shape, dtype=torch.float64)
    for row in range(out.shape[0]):
        for head in range(out.shape[1]):
            for i, x in twin(Head(o, row, head), **knobs).items():
                out[row, head, i] = x
    return out


def uniform(a: Head) -> Scores:
    return dict.fromkeys(a.entries, 1.0)


def streaming(a: Head) -> Scores:
    first_recent = a.seen - (a.budget - a.o.sinks)
    return {i: float(a.positions[i] < a.o.sinks or a.positions[i] >= first_recent) for i in a.entries}


def key_norm(a: Head) -> Scores:
    norms = {i: norm(a.k[i]) for i in a.entries}
    c = max(1.0, (max(norms.values()) - min(norms.values())) / 60)
    return softmax({i: -x / c for i, x in norms.items()})


def keydiff(a: Head) -> Scores:
    total = mean([[math.exp(a.l[i]) * x for x in unit(a.k[i])] for i in a.entries])
    return {i: 1 - dot(unit(a.k[i]), unit(total)) for i in a.entries}


def last_query(a: Head, values: bool = True, layer: bool = False) -> Scores:
    heads = [Head(a.o, a.row, h) for h in range(a.o.keys.shape[1])] if layer else [a]
    seen = []  # by position: heads hold different entries after a round
    for one in heads:
        seen.append({one.positions[i]: p for i, p in one.attended({one.asked[-1]: 1.0}).items()})
    return a.by_norm({i: sum(s.get(a.positions[i], 0.0) for s in seen) / len(heads) for i in a.entries}, values)


def snapkv(a: Head, window: int = 64, pool: int = 5, peer: bool = False) -> Scores:
    asked = a.asked[-window:]
    raw = a.attended({j: 1 / len(asked) for j in asked})
    if peer:  # zeros beyond both ends, and the observed queries' own entries are an end
        own = [i for i in a.entries if a.positions[i] >= a.seen - len(asked)]
        pooled = {
            i: sum(raw.get(n, 0.0) for n in range(i - pool // 2, i + pool // 2 + 1) if n not in own) / pool
            for i in a.entries
        }
        return {i: max(pooled.values()) if i in own else x for i, x in pooled.items()}
    near = {i: [n for n in range(i - pool // 2, i + pool // 2 + 1) if n in a.entries] for i in a.entries}
    return {i: sum(raw[n] for n in near[i]) / len(near[i]) for i in a.entries}


def h2o(a: Head, values: bool = False, divide: bool = True) -> Scores:
    total = a.attended(dict.fromkeys(a.asked, 1.0))
    for i in a.entries:
        total[i] += 0.0 if a.o.history is None else float(a.o.history[a.row, a.head, i])
        saw = sum(1 for j in range(a.seen) if j >= a.positions[i])
        total[i] /= saw if divide else 1
    return a.by_norm(total, values)


def harmonic(a: Head, rows: int | None = None, values: bool = True) -> Scores:
    prior = {j: 1 / (a.asked[-1] - j + 1) for j in a.asked}
    if rows is not None and rows < len(prior):  # the queries at the midpoints of equal shares of the prior
        below, chosen = 0.0, set()
        for j, mass in prior.items():
            share = mass / sum(prior.values())
            chosen |= {j for n in range(rows) if below < (n + 0.5) / rows <= below + share}
            below += share
        prior = dict.fromkeys(chosen, 1.0)
    return a.by_norm(a.attended({j: x / sum(prior.values()) for j, x in prior.items()}), values)


def output_error(a: Head, rows: int = 128) -> Scores:
    n = len(a.asked)
    chosen = {n - round(n ** (r / (rows - 1))) for r in range(rows)}
    total = dict.fromkeys(a.entries, 0.0)
    for j in (a.asked[c] for c in chosen):
        for g in a.groups:
            p = a.p(g, j, causal=False)
            out = a.output(p)
            for i in a.entries:
                moved = norm([x - y for x, y in zip(a.v[i], out, strict=True)])
                total[i] += p[i] * moved / norm(out) / len(chosen) / len(a.groups)
    return total


def rotated(x: Sequence[float], cos: Sequence[float], sin: Sequence[float]) -> list[float]:
    """Turn the pairs (x_c, x_{c + d/2})."""
    n = len(x) // 2
    low = [x[c] * cos[c] - x[c + n] * sin[c] for c in range(n)]
    return low + [x[c + n] * cos[c + n] + x[c] * sin[c + n] for c in range(n)]


def capkv(a: Head, form: str = "authors", tau: float = 5.0, ahead: int = 512) -> Scores:
    def turn(position: int) -> tuple[list[float], list[float]]:
        cos, sin = a.o.rotation.at(torch.tensor([position]))
        return cos[0].tolist(), sin[0].tolist()

    total = dict.fromkeys(a.entries, 0.0)
    counted = [i for i in a.entries if form == "paper" or a.positions[i] >= 4]
    for g in a.groups:
        keys, queries = {i: a.k[i] for i in counted}, [a.q[g][j] for j in a.asked]
        if form == "authors":
            queries = queries[max(0, 4 - (a.seen - len(queries))) :]
            turns = [turn(a.seen - len(queries) + n) for n in range(len(queries))]
            back = [rotated(q, cos, [-x for x in sin]) for q, (cos, sin) in zip(queries, turns, strict=True)]
            later = [turn(a.seen + n) for n in range(ahead)]
            mu = unit(rotated(mean(back), mean([c for c, _ in later]), mean([s for _, s in later])))
            keys = {i: unit(k) for i, k in keys.items()}
        else:
            mu = mean(queries)
        log_w = {i: tau * dot(keys[i], mu) + a.l[i] for i in counted}
        top, more = (max(log_w.values()), 1e-6) if form == "authors" else (0.0, 0.0)
        w = {i: math.exp(x - top) for i, x in log_w.items()}
        v = {i: torch.tensor(a.v[i], dtype=torch.float64) for i in counted}
        gram = torch.eye(len(a.v[0]), dtype=torch.float64) + sum((w[i] + more) * torch.outer(v[i], v[i]) for i in v)
        for i in counted:
            total[i] += w[i] * float(v[i] @ torch.linalg.solve(gram, v[i])) / len(a.groups)
    return {i: x if i in counted else max(total.values()) for i, x in total.items()}


def mixed(a: Head, of: Callable[[Head], Scores], eps: float) -> Scores:
    inner = of(a)
    return {i: (1 - eps) * x / sum(inner.values()) + eps / len(a.entries) for i, x in inner.items()}


def protected(a: Head) -> set[int]:
    recent, tokens = a.seen - a.o.window, [i for i in a.entries if a.positions[i] >= 0]  # none that was made
    return {i for i in tokens if a.positions[i] < a.o.sinks or a.positions[i] >= recent or not a.o.due[a.row]}


def with_certain(a: Head, by: Callable[[Head], Scores], share: float) -> Scores:
    """1 for the entries that are certain because of `by`, which come on top of sinks and window."""
    taken = protected(a)
    rank = sorted((i for i in a.entries if i not in taken), key=by(a).__getitem__, reverse=True)
    room = max(0, a.budget - len(taken))
    return dict.fromkeys(rank[: min(int(share * a.budget), room)], 1.0)
