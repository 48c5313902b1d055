"""The nouns of kvest. Nothing here computes anything worth testing.

Axes, the same letters everywhere (`docs/notation.md`): `b` rows, `h` KV heads, `g` query heads per KV head,
`q` queries, `t` entries seen, `s` slots kept, `d` key width, `e` value width, `l` layers.

Entries stand in ascending order of position and are *right-aligned*: where heads hold different numbers, the missing
slots are in front. An entry of position -1 was *made*: it is no token's, and stands in for evicted ones. Queries are
right-aligned too, and the last `q` entries are the queries' own: the query in slot `q - 1 - i` wrote the entry in slot
`t - 1 - i` and sees no later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree

from kvest.rotary import Rotation


@dataclass(frozen=True)
class Split:
    """How a layer's heads are split over processes: `rank` is this one's place in the order of heads, all hold equally
    many.

    `gather` gives the tensors of equal shape of all processes, in that order, for this one's. All of them must ask, and
    in the same order; every process gets the same bits. One process that holds all heads is the default.
    """

    rank: int = 0
    gather: Callable[[Tensor], list[Tensor]] = lambda x: [x]


@dataclass(frozen=True)
class Gone:
    """What the heads of one row let go of in one round, head after head: `counts` of the `n` entries are each head's.

    Never written to, so that rows, branches and copies share it; on the host, or mapped from a file.
    """

    keys: Float[Tensor, "n d"]
    values: Float[Tensor, "n e"]
    log_weights: Float[Tensor, "n"]
    counts: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> Gone:
        return self


@dataclass(frozen=True)
class Recollection:
    """What each head's evicted entries answered when they were last brought back.

    `reference` is the query that they were brought back for, of length 1, `output` and `log_mass` the attention over
    them and the log of the sum of its weighted exponentials. Where `known` is False they have not been asked yet.
    """

    reference: Float[Tensor, "b h g d"]
    output: Float[Tensor, "b h g e"]
    log_mass: Float[Tensor, "b h g"]
    known: Bool[Tensor, "b h"]


@dataclass(frozen=True)
class Elsewhere:
    """What a layer's rows let go of, round by round, and can be brought back when queries move (`recall`).

    `times` counts how often a head's evicted entries were brought back, `nbytes` the bytes of their keys and values.
    """

    gone: tuple[tuple[Gone, ...], ...]
    reuse: float
    below: float
    last: Recollection | None = None
    times: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Observation:
    """What one layer saw when it is about to be evicted.

    `lengths` counts the entries that really exist for each row and head (padding and missing slots are in front of
    them), `query_lengths` the queries of each row. `budget` is the number of entries per head that the budget means
    for each row before heads compete; proposals that need a size (`streaming`, `with_certain`) read it. The first
    `sinks` positions and the `window` most recent entries are `protected`: they stay, whatever the score; so does all
    of a row that is not `due` (it holds no more than its budget, while other rows of the batch are evicted).
    `history` is the attention that each entry had collected before this round, where a policy carries it; `prepared`
    are scores that passes of their own made before it (None: nobody ran them). `normalizers` are the queries'
    `log sum_i exp(scale q.k_i + log_weight_i)` over the entries up to their own, where the pass that they come from has
    worked them out (those of missing queries may be anything). `slopes`: the value of a head's made entry is
    `v + slope @ q` (None: plain `v` everywhere). `elsewhere` is what was evicted before and can be brought back.
    `layer` is the place among the `layers` that are evicted. Of the
    model, for proposals that need it: `rotation` undoes the rotary embedding of this layer, `output` is the part of its
    output projection that each query head goes through (`output[h, g] @ v`, `m` the model's width). `importance` is
    what each head's budget was measured to be worth, where an allocation asks for it. `reduction` says how attention of
    several queries and query heads becomes one number an entry. `split` reaches the layer's other heads, where
    processes share them.
    """

    queries: Float[Tensor, "b h g q d"]
    keys: Float[Tensor, "b h t d"]
    values: Float[Tensor, "b h t e"]
    log_weights: Float[Tensor, "b h t"]
    positions: Int[Tensor, "b h t"]
    lengths: Int[Tensor, "b h"]
    query_lengths: Int[Tensor, "b"]
    seen: Int[Tensor, "b"]
    budget: Int[Tensor, "b"]
    due: Bool[Tensor, "b"]
    scale: float
    sinks: int = 0
    window: int = 0
    history: Float[Tensor, "b h t"] | None = None
    slopes: Float[Tensor, "b h e d"] | None = None
    elsewhere: Elsewhere | None = None
    prepared: Float[Tensor, "b h t"] | None = None
    normalizers: Float[Tensor, "b h g q"] | None = None
    layer: int = 0
    layers: int = 1
    rotation: Rotation | None = None
    output: Float[Tensor, "h g m e"] | None = None
    reduction: Literal["mean", "max"] = "mean"
    importance: Float[Tensor, "h"] | None = None
    split: Split = Split()

    @property
    def valid(self) -> Bool[Tensor, "b h t"]:
        """Which slots hold an entry."""
        slots = torch.arange(self.keys.shape[2], device=self.keys.device)
        return slots >= self.keys.shape[2] - self.lengths[..., None]

    @property
    def made(self) -> Bool[Tensor, "b h t"]:
        """Which slots hold an entry that stands in for evicted ones: seen by queries, but never scored, drawn or kept.

        A round makes them anew from what they stood for; only where a head keeps all, they stay as they are.
        """
        return self.valid & (self.positions < 0)

    @property
    def query_valid(self) -> Bool[Tensor, "b q"]:
        """Which slots hold a query."""
        q = self.queries.shape[3]
        return torch.arange(q, device=self.queries.device) >= q - self.query_lengths[:, None]

    @property
    def protected(self) -> Bool[Tensor, "b h t"]:
        """Sinks and window, and all tokens' entries of a row that is not due: what stays whatever the score."""
        recent = self.positions >= (self.seen - self.window)[:, None, None]
        stays = (self.positions < self.sinks) | recent | ~self.due[:, None, None]
        return self.valid & ~self.made & stays

    def head(self, row: int, head: int) -> Observation:
        """One head of one row, as views."""
        one, only = slice(row, row + 1), slice(head, head + 1)
        wide = (
            "queries",
            "keys",
            "values",
            "log_weights",
            "positions",
            "lengths",
            "history",
            "slopes",
            "prepared",
            "normalizers",
        )
        parts = {name: x[one, only] for name in wide if (x := getattr(self, name)) is not None}
        parts |= {name: getattr(self, name)[one] for name in ("query_lengths", "seen", "budget", "due")}
        parts |= {name: x[only] for name in ("output", "importance") if (x := getattr(self, name)) is not None}
        return replace(self, **parts)

    def recent(self, count: int | None) -> Observation:
        """The same entries, seen by the last `count` queries only (None: by all that there are)."""
        q = self.queries.shape[3]
        if count is None or count >= q:
            return self
        return replace(
            self,
            queries=self.queries[:, :, :, q - count :],
            query_lengths=self.query_lengths.clamp(max=count),
            normalizers=None if self.normalizers is None else self.normalizers[..., q - count :],
        )


@dataclass(frozen=True)
class Proposal:
    """How much each entry matters: `score >= 0` (0 on missing slots), and the entries that are certain to stay.

    `history` is the attention collected so far, for a policy that evicts again (None: nothing to carry).
    """

    score: Float[Tensor, "b h t"]
    certain: Bool[Tensor, "b h t"]
    history: Float[Tensor, "b h t"] | None = None


@dataclass(frozen=True)
class Draw:
    """Which entries stay, and with what probability they did.

    `inclusion` is P(entry kept) in float64, 1 for certain entries and 0 on missing slots; `multiplicity` how often an
    entry was drawn and `expected` its mean (without replacement: keep and inclusion once more).
    """

    keep: Bool[Tensor, "b h t"]
    inclusion: Float[Tensor, "b h t"]
    multiplicity: Int[Tensor, "b h t"]
    expected: Float[Tensor, "b h t"]


@dataclass(frozen=True)
class Made:
    """Entries that stand in for evicted ones: the first `counts` of each head's `n` slots hold one

    With `slopes`, the value of a head's first entry is `v + slope @ q` from now on (0 in heads that hold none made).
    """

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    log_weights: Float[Tensor, "b h n"]
    counts: Int[Tensor, "b h"]
    slopes: Float[Tensor, "b h e d"] | None = None


@dataclass(frozen=True)
class Kept:
    """What stays of a layer: `log_weights` is what this round adds to those of kept entries, `made` stands in for the
    others (None: nothing does), `elsewhere` can be asked for them."""

    observation: Observation
    log_weights: Float[Tensor, "b h t"]
    made: Made | None = None
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True)
class Retained:
    """The entries that stay, packed without gaps: head by head, row by row, ascending positions (made ones first).

    `counts[row][head]` says how many of the `s` slots belong to each head, in that order. `slopes`: the value of a
    head's first entry is `v + slope @ q` (None: plain `v` everywhere).
    """

    keys: Float[Tensor, "s d"]
    values: Float[Tensor, "s e"]
    log_weights: Float[Tensor, "s"]
    positions: Int[Tensor, "s"]
    counts: tuple[tuple[int, ...], ...]
    history: Float[Tensor, "s"] | None = None
    slopes: Float[Tensor, "b h e d"] | None = None
    elsewhere: Elsewhere | None = None


for _noun in (Gone, Recollection, Elsewhere, Observation, Proposal, Draw, Made, Kept, Retained):
    _pytree.register_dataclass(_noun)
