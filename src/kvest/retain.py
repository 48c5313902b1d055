"""The only place where entries are dropped, stored and counted.

Storage is flat: all heads' entries in one tensor, head after head, with offsets. Heads may hold different numbers, and
bytes fall accordingly; equal numbers make it a plain `[b, h, s, d]` view.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvest.types import Draw, Elsewhere, Made, Observation, Proposal, Recollection, Retained


def retain(
    observation: Observation,
    draw: Draw,
    log_weights: Float[Tensor, "b h t"],
    proposal: Proposal | None = None,
    made: Made | None = None,
    elsewhere: Elsewhere | None = None,
) -> Retained:
    """Copy the kept entries into storage of their own; `log_weights` is what this round adds.

    `proposal` is given where its history must be carried to the next round. `made` entries stand in front of each
    head's kept ones.
    """
    keep = draw.keep
    index = keep.flatten().nonzero()[:, 0]
    counts = keep.sum(dim=-1)
    if made is not None:
        n = made.keys.shape[2]
        there = (torch.arange(n, device=keep.device) < made.counts[..., None]).flatten().nonzero()[:, 0]
        order = torch.cat([there // n, index // keep.shape[2]]).argsort(stable=True)  # by head, the made ones first
        counts = counts + made.counts

    def pick(x: Tensor, name: str | int) -> Tensor:
        """`name`: what it is of the made entries, or the number that it is for them."""
        mine = x.flatten(0, 2).index_select(0, index)
        if made is None:
            return mine
        if isinstance(name, str):
            before = getattr(made, name).flatten(0, 2).index_select(0, there)
        else:
            before = mine.new_full((len(there),), name)
        return torch.cat([before, mine]).index_select(0, order)

    carried = proposal.history if proposal is not None else None
    return Retained(
        keys=pick(observation.keys, "keys"),
        values=pick(observation.values, "values"),
        log_weights=pick(observation.log_weights + log_weights, "log_weights"),
        positions=pick(observation.positions, -1).to(torch.int32),
        counts=tuple(tuple(row) for row in counts.tolist()),
        history=None if carried is None else pick(carried, 0),
        slopes=None if made is None else made.slopes,
        elsewhere=elsewhere,
    )


def of_rows(elsewhere: Elsewhere, rows: list[int]) -> Elsewhere:
    """What these rows let go of, in this order; nothing is copied."""
    last = elsewhere.last
    if last is not None:
        last = Recollection(*(getattr(last, f.name)[rows] for f in fields(last)))
    return replace(elsewhere, gone=tuple(elsewhere.gone[row] for row in rows), last=last)


@dataclass(frozen=True)
class Run:
    """Neighbouring heads that own equally many slots, as views: `k` heads of `c` slots, free slots of weight 0."""

    heads: slice
    keys: Float[Tensor, "1 k c d"]
    values: Float[Tensor, "1 k c e"]
    bias: Float[Tensor, "1 k 1 c"]  # the log weights
    slopes: Float[Tensor, "1 k e d"] | None = None  # of the values of the heads' first entries


def room(entries: int) -> int:
    """Slots for a head of so many entries: the next multiple of 16, or of the power of two below a 64th of them.

    So a long cache has at most 1.6 % of free slots, growing copies about 64 entries for each that is appended, and the
    capacity suits the blocks in which attention kernels work.
    """
    step = max(16, 1 << max(entries // 64, 1).bit_length() - 1)
    return max(-(-entries // step), 1) * step


class Store:
    """Kept entries with room to append: what a cache layer holds after an eviction.

    Each head owns `capacity` slots in the flat tensors, of which the first `length` are taken; free slots have log
    weight -inf, so that attention may run over them.
    """

    def __init__(self, retained: Retained) -> None:
        self.rows, self.heads = len(retained.counts), len(retained.counts[0])
        self.lengths = [n for row in retained.counts for n in row]
        self.capacities = list(self.lengths)
        self.keys, self.values = retained.keys, retained.values
        self.log_weights, self.positions = retained.log_weights, retained.positions
        self.history, self.slopes = retained.history, retained.slopes
        self.elsewhere = retained.elsewhere
        self._shared = True  # with `retained`, until the first growth
        self._ends: Int[Tensor, "bh"] | None = None
        self._place()

    def _place(self) -> None:
        starts = [0]
        for capacity in self.capacities:
            starts.append(starts[-1] + capacity)
        self.starts = starts[:-1]
        self._ends = None
        self._runs: list[Run] | None = None

    def runs(self) -> list[Run]:
        """All heads in order, neighbours of equal capacity together (one run where all are equal)."""
        if self._runs is None:
            self._runs = []
            for capacity, group in groupby(range(len(self.capacities)), key=self.capacities.__getitem__):
                members = list(group)
                heads = slice(members[0], members[-1] + 1)
                part = slice(self.starts[heads.start], self.starts[heads.start] + capacity * len(members))
                shape = (1, len(members), capacity)
                self._runs.append(
                    Run(
                        heads,
                        self.keys[part].view(*shape, -1),
                        self.values[part].view(*shape, -1),
                        self.log_weights[part].view(1, len(members), 1, capacity),
                        None if self.slopes is None else self.slopes.flatten(0, 1)[None, heads],
                    )
                )
            self.run_sizes = [run.heads.stop - run.heads.start for run in self._runs]
        return self._runs

    def append(
        self,
        keys: Float[Tensor, "b h n d"],
        values: Float[Tensor, "b h n e"],
        positions: Int[Tensor, "b n"],
        exists: Bool[Tensor, "b n"] | None = None,
    ) -> None:
        """Append exact entries; where `exists` is False (padding) nothing is stored."""
        b, h, n, _ = keys.shape
        added = [n] * b if exists is None else exists.sum(dim=1).tolist()
        wanted = [self.lengths[i] + added[i // h] for i in range(b * h)]
        keys, values = keys.detach().to(self.keys.dtype), values.detach().to(self.values.dtype)
        if self._foreign or any(w > c for w, c in zip(wanted, self.capacities, strict=True)):
            self.make_room([room(w) for w in wanted])
        if self._ends is None:
            ends = [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
            self._ends = torch.tensor(ends, device=keys.device)
        self.lengths = wanted  # first: where writing fails, `cut` takes back what is there
        if exists is None:
            slots = self._ends[:, None] + torch.arange(n, device=keys.device)
            keys, values = keys.reshape(b * h * n, -1), values.reshape(b * h * n, -1)
            where = positions[:, None].expand(b, h, n).reshape(-1)
            self._ends = self._ends + n
        else:
            rank = exists.cumsum(dim=1) - 1
            every = exists[:, None].expand(b, h, n)
            slots = (self._ends.view(b, h, 1) + rank[:, None])[every]
            keys, values = keys[every], values[every]
            where = positions[:, None].expand(b, h, n)[every]
            self._ends = (self._ends.view(b, h) + exists.sum(dim=1)[:, None]).flatten()
        slots = slots.reshape(-1)
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)
        self.log_weights.index_fill_(0, slots, 0.0)
        self.positions.index_copy_(0, slots, where.to(self.positions.dtype))
        if self.history is not None:
            self.history.index_fill_(0, slots, 0.0)

    @property
    def _foreign(self) -> bool:
        """Whether the tensors were made in an inference mode that is over: nothing can be written to them any more."""
        return self.keys.is_inference() and not torch.is_inference_mode_enabled()

    def make_room(self, capacities: list[int]) -> None:
        """Move to storage in which every head owns so many slots."""
        source, before = self.taken(), self.capacities
        self.capacities = list(capacities)
        self._place()
        target = self.taken()
        size = sum(self.capacities)

        def move(x: Tensor, fill: float) -> Tensor:
            return x.new_full((size, *x.shape[1:]), fill).index_copy_(0, target, x.index_select(0, source))

        fills = {"keys": 0.0, "values": 0.0, "log_weights": -torch.inf, "positions": 0.0, "history": 0.0}
        held = {name: x for name in fills if (x := getattr(self, name)) is not None}
        try:
            moved = {name: move(x, fills[name]) for name, x in held.items()}
        except BaseException:  # no memory, or an interrupt: all as it was
            self.capacities = before
            self._place()
            raise
        self.__dict__.update(moved)
        self._shared = False

    def taken(self) -> Int[Tensor, "s"]:
        """Slots of all entries, head after head."""
        device = self.keys.device
        lengths = torch.tensor(self.lengths, device=device)
        skipped = torch.tensor(self.starts, device=device) - (lengths.cumsum(0) - lengths)
        return torch.arange(sum(self.lengths), device=device) + skipped.repeat_interleave(lengths)

    def cut(self, lengths: list[int]) -> None:
        """Take back the latest entries: the first `lengths[i]` of head i stay. Costs as much as what is taken back."""
        if lengths == self.lengths:
            return
        if self._shared or self._foreign:
            self.make_room([room(n) for n in self.lengths])
        ends = [(s + new, s + old) for s, new, old in zip(self.starts, lengths, self.lengths, strict=True)]
        freed = torch.cat([torch.arange(*end) for end in ends]).to(self.keys.device)
        self.log_weights.index_fill_(0, freed, -torch.inf)
        self.lengths = list(lengths)
        if self.elsewhere is not None:  # what it answered may have been for a query that is taken back
            self.elsewhere = replace(self.elsewhere, last=None)
        self._ends = torch.tensor([end for end, _ in ends], device=self.keys.device)

    def retained(self, rows: list[int] | None = None) -> Retained:
        """The entries without gaps, of these rows (default: all; a row may be named several times)."""
        slots = self.taken()
        if rows is not None:
            parts = torch.split(slots, [sum(self.counts(row)) for row in range(self.rows)])
            slots = torch.cat([parts[row] for row in rows])
        return Retained(
            keys=self.keys[slots],
            values=self.values[slots],
            log_weights=self.log_weights[slots],
            positions=self.positions[slots],
            counts=tuple(tuple(self.counts(row)) for row in (range(self.rows) if rows is None else rows)),
            history=None if self.history is None else self.history[slots],
            slopes=self.slopes if self.slopes is None or rows is None else self.slopes[rows],
            elsewhere=self.elsewhere if self.elsewhere is None or rows is None else of_rows(self.elsewhere, rows),
        )

    def counts(self, row: int) -> list[int]:
        """Entries held by each head of a row."""
        return self.lengths[row * self.heads : (row + 1) * self.heads]

    def head(self, x: Tensor, row: int, head: int) -> Tensor:
        """One head's part of one of the flat tensors."""
        i = row * self.heads + head
        return x[self.starts[i] : self.starts[i] + self.lengths[i]]

    def right_aligned(self) -> tuple[Int[Tensor, "b h t"], Int[Tensor, "b h"]]:
        """(slot of every entry in a padded view `[b, h, t]`, entries of each head); missing slots point at slot 0."""
        device = self.keys.device
        lengths = torch.tensor(self.lengths, device=device)
        starts = torch.tensor(self.starts, device=device)
        t = max(self.lengths)
        slots = torch.arange(t, device=device) - (t - lengths)[:, None]
        slots = (starts[:, None] + slots).masked_fill(slots < 0, 0)
        return slots.view(self.rows, self.heads, t), lengths.view(self.rows, self.heads)
