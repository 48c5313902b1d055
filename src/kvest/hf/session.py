"""What the layers of one cache share: which tokens exist, how many were seen, and who is due for eviction.

All of it belongs to one cache. Nothing is kept on the model, and nothing here is read back from the device in a decode
step without padding.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvest.budget import Footprint
from kvest.hf.parallel import Share
from kvest.policy import Policy
from kvest.rotary import Rotation
from kvest.types import Observation, Proposal

INDEX_BYTES = 8
"""Bytes of an entry besides key and value: a float32 log weight and an int32 position."""

HISTORY_BYTES = 4
"""Bytes of the attention that an entry collected so far, float32, where a later round needs it."""


_DRAFTS = "assisted decoding takes drafts back, and"
_WITHOUT = "Leave out assistant_model and prompt_lookup_num_tokens"

STATE = (
    *("columns", "seen", "held", "rounds", "evicted", "padded"),
    *("exists", "tail", "watched", "watched_columns", "prompt_tokens", "drafts"),
)
"""What of a session changes with every pass."""


@runtime_checkable
class Evictable(Protocol):
    """A layer, as the session sees it."""

    index: int
    observed: tuple[Observation, Proposal] | None

    def evict(self, counts: Int[Tensor, "b h"]) -> None: ...


@dataclass
class Step:
    """One forward pass: `exists[b, n]` says which of its `n` tokens are real (None: all), `added` how many per row.

    `due` and `budgets` are decided when the first layer's keys come (their shapes tell what an entry costs). `watched`
    says which of the latest columns' queries each row has not been evicted by yet (None: all that are kept), `left` the
    same after this pass, of `left_columns` columns.
    """

    columns: int
    tokens: int
    exists: Bool[Tensor, "b n"] | None
    added: list[int]
    due: list[bool] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    watched: Bool[Tensor, "b n"] | None = None
    left: Bool[Tensor, "b n"] | None = None
    left_columns: int = 0
    positions: Int[Tensor, "b n"] | None = None  # real positions of the columns, once a layer asked for them


class Session:
    """The state of one cache. `seen`, `held` and `rounds` have one number per row: real tokens seen, entries per head
    by the budget's count, evictions done."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        seed: int,
        config: Any,
        evictable: list[int],
        rotations: list[Rotation | None],
        importance: list[Float[Tensor, "h"]] | None,
        window_tokens: int,
        share: Share,
    ) -> None:
        self.model, self.policy, self.seed, self.config = weakref.ref(model), policy, seed, config
        self.evictable, self.rotations, self.share = evictable, rotations, share
        self.importance = importance  # of each evictable layer, where the allocation needs it
        self.window_tokens = window_tokens  # summed over bounded layers: what they hold at most
        self.marks: list[Any] = []  # of branches that are open: what they keep alive is held by this cache
        self.reset()

    def reset(self) -> None:
        self.columns = 0  # tokens and padding seen by every layer
        self.seen: list[int] = []
        self.held: list[int] = []
        self.rounds: list[int] = []
        self.evicted = False
        self.padded = False
        self.exists: Bool[Tensor, "b n"] | None = None  # of the columns since the last eviction; None: all real
        self.tail = 0  # columns since the last eviction
        self.watched: Bool[Tensor, "b n"] | None = None  # as in Step, before the pass
        self.watched_columns = 0
        self.step: Step | None = None
        self.waiting: int | None = None  # a layer whose keys the attention function has not seen yet
        self.pending: list[Evictable] = []  # layers of this pass that wait for the others to compete with
        self.prompt_tokens = 0
        self.drafts = False  # whether the first pass will hold tokens that may be taken back
        self.puts_off = False  # whether eviction waits for passes that `prepare` runs first
        self.listener: Callable[[Any, Tensor, float], None] | None = None  # hears one of those passes

    def state(self) -> dict[str, Any]:
        """Everything between two passes. Raises RuntimeError where a pass did not finish."""
        if self.step is not None:
            raise RuntimeError("the last pass over this cache did not finish: call cache.reset(), or make a new one")
        return {name: copy.copy(getattr(self, name)) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a `state`; a pass that did not finish is forgotten."""
        vars(self).update(state, step=None, waiting=None, pending=[])

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A session of its own for a copied cache; model, policy and config stay shared."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.marks = []
        for name, value in vars(self).items():
            if name not in ("marks", "model", "policy", "config", "evictable", "rotations", "importance"):
                setattr(new, name, copy.deepcopy(value, memo))
        return new

    def begin(self, attention_mask: Tensor | None, rows: int, tokens: int, columns: int) -> None:
        """A forward pass over `tokens` new columns starts. Called while the model makes its masks."""
        if columns == 0 and self.policy.propose.extra_passes and not self.puts_off:
            raise ValueError(
                f"{self.policy} scores a document while the model repeats it: read it with "
                "cache.prepare(input_ids, attention_mask) first, then generate from the cache"
            )
        if not self.seen:
            self.seen, self.held, self.rounds = [0] * rows, [0] * rows, [0] * rows
        if len(self.seen) != rows:
            raise ValueError(
                f"this cache holds {len(self.seen)} rows, and the input has {rows}: use one cache per batch"
            )
        if columns != self.columns:
            raise RuntimeError(
                f"an earlier pass over this cache did not finish: its layers have seen {columns} tokens, the cache as "
                f"a whole {self.columns}. Call cache.reset(), or make a new EvictionCache, and read the prompt again"
            )
        exists = None
        if attention_mask is not None:
            if attention_mask.shape[-1] != columns + tokens:
                raise ValueError(
                    f"the attention mask covers {attention_mask.shape[-1]} tokens, but the cache has seen {columns} "
                    f"and {tokens} are new: it must cover all {columns + tokens} (padding included)"
                )
            exists = attention_mask[:, columns:].bool()
        added = [tokens] * rows
        if exists is not None and (tokens > 1 or self.padded or exists.device.type == "cpu"):
            added = exists.sum(dim=1).tolist()  # on an accelerator: once per prompt, turn, or step of a padded batch
            if min(added) == tokens:
                exists = None
        elif exists is not None:
            exists = None
        self.padded = self.padded or exists is not None
        if columns == 0 and min(added) == 0:
            raise ValueError(f"row {added.index(0)} of the prompt has no token that is not padding")
        self.waiting, self.pending = None, []
        self.step = Step(columns, tokens, exists, added)

    def _note_chunks(self, step: Step) -> None:
        """A second pass as long as the first, with nothing decoded between: most likely a chunked prefill."""
        tokens = step.tokens
        if step.columns == 0:
            self.prompt_tokens = tokens
            return
        beyond = any(n + a > budget for n, a, budget in zip(self.held, step.added, step.budgets, strict=True))
        once = self.policy.every is None and self.listener is None
        if step.columns == self.prompt_tokens == tokens > 1 and beyond and once:
            warnings.warn(
                f"two passes of {tokens} tokens in a row look like a chunked prefill, and this policy evicts after the "
                "first pass only: later chunks stay whole. Set every=N to hold the budget after every chunk.",
                stacklevel=2,
            )

    def plan(self, keys: Tensor, values: Tensor) -> Step:
        """Decide which rows are evicted after this pass. `keys[b, h, n, d]` are the new ones of one layer."""
        step = self.step
        if step is None:
            raise RuntimeError(
                "kvest did not make the attention mask of this pass: the cache was made for another model, the model's "
                "attention implementation was changed since (make a new EvictionCache), or a custom 4D attention mask "
                "was passed (pass a 2D one, 1 for tokens and 0 for padding)"
            )
        if not step.due:
            policy = self.policy
            step.budgets = self._budgets(step.added, keys, values)
            for held, added, budget in zip(self.held, step.added, step.budgets, strict=True):
                held += added
                if step.columns == 0 or step.tokens == 0:
                    due = held > budget and not self.puts_off
                elif policy.every is None or added == 0:
                    due = False
                else:
                    due = held > budget if added > 1 else held >= budget + policy.every
                step.due.append(due)
            if self.drafts and any(step.due):
                self._refuse_drafts()
            self._note_chunks(step)
            self._watch(step, keys.device)
        return step

    def _budgets(self, added: list[int], keys: Tensor, values: Tensor) -> list[int]:
        """Entries per head that each row may keep once so many tokens are added."""
        rows, heads, _, width = keys.shape
        self.share.check(heads)
        heads *= self.share.size  # a budget of bytes is for the whole cache
        wide = (width + values.shape[-1]) * keys.element_size()
        beside = len(self.evictable) * self.policy.stand_in.beside(width, values.shape[-1]) * keys.element_size()
        carried = HISTORY_BYTES if self.policy.every is not None and self.policy.propose.carries else 0
        footprint = Footprint(
            entry_bytes=len(self.evictable) * heads * (wide + INDEX_BYTES + carried),
            fixed_bytes=rows * heads * (self.window_tokens * wide + beside),
            rows=rows,
        )
        protected = self.policy.sinks + self.policy.window
        entries = self.policy.budget.entries
        return [entries(seen + n, protected, footprint) for seen, n in zip(self.seen, added, strict=True)]

    def overdue(self, keys: Tensor, values: Tensor) -> list[bool]:
        """Which rows hold more than their budget, now that an eviction was put off."""
        budgets = self._budgets([0] * len(self.seen), keys, values)
        return [held > budget for held, budget in zip(self.held, budgets, strict=True)]

    def begin_late(self) -> None:
        """A pass without tokens: the eviction that was put off."""
        self.step = Step(self.columns, 0, None, [0] * len(self.seen))

    def _watch(self, step: Step, device: torch.device) -> None:
        """Queries are kept until every row that has not been evicted by them is: rows come due at different times."""
        columns = self.watched_columns + step.tokens
        step.watched = step.left = _join(self.watched, self.watched_columns, step)
        step.left_columns = columns if self.remembers else 0
        if all(step.due) or not self.remembers:
            step.left, step.left_columns = None, 0
        elif any(step.due):
            where = device if step.watched is None else step.watched.device
            waits = ~torch.tensor(step.due, device=where)[:, None]
            left = waits.expand(-1, columns) if step.watched is None else step.watched & waits
            used = left.any(dim=0)
            step.left_columns = columns - int(used.long().argmax()) if bool(used.any()) else 0
            step.left = left[:, columns - step.left_columns :]

    def planned(self) -> Step:
        """The pass under way; an error where there is none."""
        if self.step is None or not self.step.due:
            raise RuntimeError("no forward pass is under way")
        return self.step

    @property
    def remembers(self) -> bool:
        """Whether queries must be kept for a later eviction."""
        return self.policy.every is not None or self.puts_off

    def after(self, layer: Evictable) -> None:
        """A layer's attention is done: evict it, alone or with all others once the last one is there."""
        if layer.observed is not None:
            self.pending.append(layer)
        last = layer.index == self.evictable[-1]
        if self.pending and (last or not self.policy.allocate.whole_model):
            self._evict()
        if last:
            self.finish()

    @torch.no_grad()
    def _evict(self) -> None:
        """Evict the layers that wait. Each lets go of all that it held before the next one's entries are copied."""
        observations, proposals = zip(*(each.observed for each in self.pending if each.observed), strict=True)
        counts = self.policy.allocate(proposals, observations, self.policy.design)
        del observations, proposals
        for each, mine in zip(self.pending, counts, strict=True):
            each.evict(mine)
        self.pending = []

    def finish(self) -> None:
        """The last evicted layer is done with this pass."""
        step = self.planned()
        evicts = any(step.due)
        for row, (added, budget, due) in enumerate(zip(step.added, step.budgets, step.due, strict=True)):
            self.seen[row] += added
            self.held[row] = budget if due else self.held[row] + added
            self.rounds[row] += due
        self.columns = step.columns + step.tokens
        self.exists = None if evicts else self.tail_exists()
        self.tail = 0 if evicts else self.tail + step.tokens
        self.evicted = self.evicted or evicts
        self.watched, self.watched_columns = step.left, step.left_columns
        self.step, self.drafts = None, False

    def tail_exists(self) -> Bool[Tensor, "b n"] | None:
        """Which columns since the last eviction are real, those of the current pass included; None: all."""
        return self.exists if self.step is None else _join(self.exists, self.tail, self.step)

    def positions(self, device: torch.device) -> Int[Tensor, "b n"]:
        """Real positions of the current pass's columns (of padding: those of the token before)."""
        step = self.planned()
        if step.positions is None or step.positions.device != device:
            if step.exists is None and len(set(self.seen)) == 1:  # made on the device: nothing is copied to it
                first, rows = self.seen[0], len(self.seen)
                step.positions = torch.arange(first, first + step.tokens, device=device).expand(rows, step.tokens)
            else:
                start = torch.tensor(self.seen).to(device, non_blocking=True)[:, None]
                new = torch.arange(step.tokens, device=device) if step.exists is None else step.exists.cumsum(1) - 1
                step.positions = start + new.to(device)
        return step.positions

    def expect_drafts(self) -> None:
        """The next pass holds drafts besides the prompt. Raises ValueError where that could not be right."""
        if self.policy.every is not None:
            raise ValueError(f"{_DRAFTS} {self.policy} goes on evicting with them among its entries. {_WITHOUT}")
        if self.columns > 0:
            raise ValueError(
                f"assisted decoding reads the whole prompt, and this cache has seen {self.columns} tokens already. "
                f"{_WITHOUT}"
            )
        self.drafts = True

    def _refuse_drafts(self) -> None:
        self.drafts = False
        raise ValueError(
            f"{_DRAFTS} {self.policy} is due after this first pass, which holds some besides the prompt. {_WITHOUT}"
        )

    def crop(self, count: int) -> None:
        """Forget the latest `count` columns, all of them real and newer than the last eviction."""
        if count > self.tail or (self.exists is not None and not bool(self.exists[:, self.tail - count :].all())):
            raise ValueError(
                f"cannot take back {count} tokens: only the {self.tail} since the last eviction are still whole "
                "(padding cannot be taken back either). Assisted decoding over an evicted prompt is not supported"
            )
        self.columns -= count
        self.tail -= count
        self.seen = [n - count for n in self.seen]
        self.held = [n - count for n in self.held]
        if self.exists is not None:
            self.exists = self.exists[:, : self.tail]
        self.watched_columns = max(self.watched_columns - count, 0)
        if self.watched is not None:
            self.watched = self.watched[:, : self.watched_columns]

    def select(self, rows: list[int]) -> None:
        """These rows of the batch, in this order."""
        self.seen = [self.seen[row] for row in rows]
        self.held = [self.held[row] for row in rows]
        self.rounds = [self.rounds[row] for row in rows]
        if self.exists is not None:
            self.exists = self.exists[torch.tensor(rows, device=self.exists.device)]
        if self.watched is not None:
            self.watched = self.watched[torch.tensor(rows, device=self.watched.device)]


def _join(before: Bool[Tensor, "b m"] | None, columns: int, step: Step) -> Bool[Tensor, "b n"] | None:
    """Flags of `columns` columns and of those of this pass; None: all True."""
    if before is None and step.exists is None:
        return None
    device = (before if before is not None else step.exists).device  # type: ignore[union-attr]  # one is there
    rows = len(step.added)
    if before is None:
        before = torch.ones(rows, columns, dtype=torch.bool, device=device)
    now = step.exists if step.exists is not None else torch.ones(rows, step.tokens, dtype=torch.bool, device=device)
    return torch.cat([before, now.to(device)], dim=1)
