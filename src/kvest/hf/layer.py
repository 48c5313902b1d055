"""One layer of an `EvictionCache`: a stock cache layer until the first eviction, a `Store` afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvest.attend import attend
from kvest.hf import compat
from kvest.hf.session import Session
from kvest.random import Stream
from kvest.retain import Store
from kvest.types import Observation, Proposal, Retained

ATTRIBUTE = "_kvest_layer"
"""Set on the keys that `update` returns: this is how the attention function finds its layer."""


class MaskLength(int):
    """A number of entries that knows whose it is: this is how the mask function finds its session."""

    session: Session
    columns: int


class EvictionLayer(CacheLayerMixin):
    """Keys and values of one layer; appends in `update`, attends and observes in `attend`."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, session: Session) -> None:
        super().__init__()
        self.index, self.session = index, session
        self.module: weakref.ref[nn.Module] | None = None  # the attention module that this layer belongs to
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.columns = 0
        self.store: Store | None = None
        self.queries: list[Float[Tensor, "b hg n d"]] = []
        self.observed: tuple[Observation, Proposal] | None = None

    # -- what transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        wide = key_states.shape[3] * key_states.element_size() + value_states.shape[3] * value_states.element_size()
        self.token_bytes = key_states.shape[1] * wide  # what a stock layer holds for one token
        self.is_initialized = True

    def get_seq_length(self, *_: Any) -> int:
        """Tokens seen, padding included; what is held is another number."""
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        length = MaskLength(self.columns + compat.query_length(queries))
        length.session, length.columns = self.session, self.columns
        return length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append; return what the attention function is to see: everything before the first eviction, then the new."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        session = self.session
        if session.waiting is not None:
            raise RuntimeError(
                f"kvest's attention never saw the keys of layer {session.waiting}: the model does something to them between "
                "cache and attention that kvest does not know. Use the stock cache for it"
            )
        step = session.plan(key_states, value_states)
        session.waiting = self.index
        self.columns += key_states.shape[2]
        if self.store is None:
            grown = self.keys is not None
            self.keys = torch.cat([self.keys, key_states], dim=2) if grown else key_states
            self.values = torch.cat([self.values, value_states], dim=2) if grown else value_states
            keys, values = self.keys.view_as(self.keys), self.values
        else:
            self.store.append(key_states, value_states, session.positions(key_states.device), step.exists)
            keys, values = key_states.view_as(key_states), value_states
        setattr(keys, ATTRIBUTE, self)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(len(self.session.seen)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self.session.seen), device=indices.device)[indices]
        self.select(rows.tolist())

    def select(self, rows: list[int]) -> None:
        """These rows of the batch, in this order."""
        if not self.is_initialized:
            return
        index = torch.tensor(rows, device=self.device)
        if self.store is not None:
            self.store = Store(self.store.retained(rows))
        else:
            self.keys, self.values = self.keys[index], self.values[index]
        self.queries = [query[index] for query in self.queries]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens (a negative number); the session has checked that they are whole."""
        count = -tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return
        self.columns -= count
        if self.store is not None:
            self.store.crop(count)
        else:
            self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]
        if self.queries:
            self.queries = [torch.cat(self.queries, dim=2)[:, :, :-count]]

    # -- what kvest does

    def attend(
        self, queries: Float[Tensor, "b hg q d"], scale: float, exact: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the new tokens; then evict, if the layer is due. `exact` computes it as without kvest."""
        session = self.session
        step = session.step
        if step is None or step.due is None:
            raise RuntimeError("attention without a pass")
        if self.store is None:
            output = exact()
        else:
            output = attend(queries, self.store, scale, step.exists).transpose(1, 2).contiguous(), None
        session.waiting = None
        self.scale = scale
        if any(step.due) or session.remembers:
            self.queries.append(queries)
            self._forget_old_queries()
        if any(step.due):
            self._propose(scale)
        return output

    def _forget_old_queries(self) -> None:
        """Keep what the policy looks at: of a proposal with a window, not more columns than that."""
        limit = self.session.policy.propose.queries
        if limit is None:
            return
        limit = max(limit, self.session.policy.correct.queries)
        total = sum(query.shape[2] for query in self.queries)
        if limit == 0:
            self.queries = []
        elif total > limit:
            joined = torch.cat(self.queries, dim=2) if len(self.queries) > 1 else self.queries[0]
            self.queries = [joined[:, :, total - limit :]]

    def _propose(self, scale: float) -> None:
        policy = self.session.policy
        observation = self.observe(scale)
        proposal = policy.proposal(observation)
        self.observed = (observation.recent(policy.correct.queries), proposal)
        self.queries = []

    def stream(self) -> Stream:
        """The layer's random numbers of this round."""
        return Stream(self.session.seed, self.index, tuple(self.session.rounds))

    def settle(self, retained: Retained) -> None:
        """Hold what was kept, and nothing else."""
        self.store = Store(retained)
        self.keys = self.values = self.observed = None

    def observe(self, scale: float) -> Observation:
        """All that the layer holds and the queries since its last eviction, right-aligned."""
        session = self.session
        step = session.step
        if step is None or step.due is None:
            raise RuntimeError("observation without a pass")
        device = self.device
        seen = torch.tensor([n + a for n, a in zip(session.seen, step.added, strict=True)], device=device)
        due = torch.tensor(step.due, device=device)
        exists = session.tail_exists()
        observation = self._stored() if self.store is not None else self._whole(seen, exists)
        b, h = observation.lengths.shape
        queries, query_lengths = self._queries(h, exists)
        budget = torch.tensor(step.budgets, device=device)
        return replace(
            observation,
            queries=queries,
            query_lengths=query_lengths,
            seen=seen,
            budget=torch.where(due, budget, observation.keys.shape[2]),
            due=due,
            scale=scale,
            sinks=session.policy.sinks,
            window=session.policy.window,
            rotation=session.rotation,
        )

    def _whole(self, seen: Tensor, exists: Bool[Tensor, "b t"] | None) -> Observation:
        """Before the first eviction: every token, exact."""
        keys, values = self.keys, self.values
        b, h, t, _ = keys.shape
        if exists is not None:
            keys, values = align(keys, exists), align(values, exists)
        positions = torch.arange(t, device=keys.device) - (t - seen)[:, None]
        return self._blank(
            keys,
            values,
            positions[:, None].expand(b, h, t),
            torch.zeros(b, 1, 1, device=keys.device).expand(b, h, t),
            seen[:, None].expand(b, h),
            None,
        )

    def _stored(self) -> Observation:
        """After an eviction: what each head kept and all since, in one padded block."""
        store = self.store
        assert store is not None
        slots, lengths = store.right_aligned()
        history = None if store.history is None else store.history[slots]
        missing = torch.arange(slots.shape[2], device=slots.device) < slots.shape[2] - lengths[..., None]
        weights = store.log_weights[slots].masked_fill(missing, 0.0)
        history = None if history is None else history.masked_fill(missing, 0.0)
        return self._blank(
            store.keys[slots], store.values[slots], store.positions[slots].long(), weights, lengths, history
        )

    def _blank(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        log_weights: Tensor,
        lengths: Tensor,
        history: Tensor | None,
    ) -> Observation:
        b, h, _, d = keys.shape
        none = torch.zeros(b, dtype=torch.int64, device=keys.device)
        return Observation(
            queries=keys.new_empty(b, h, 1, 0, d),
            keys=keys,
            values=values,
            log_weights=log_weights,
            positions=positions,
            lengths=lengths,
            query_lengths=none,
            seen=none,
            budget=none,
            due=none.bool(),
            scale=1.0,
            history=history,
        )

    def _queries(self, h: int, exists: Bool[Tensor, "b n"] | None) -> tuple[Tensor, Tensor]:
        if not self.queries:
            rows = len(self.session.seen)
            empty = torch.empty(rows, h, 1, 0, 1, dtype=self.dtype, device=self.device)
            return empty, torch.zeros(rows, dtype=torch.int64, device=self.device)
        queries = torch.cat(self.queries, dim=2) if len(self.queries) > 1 else self.queries[0]
        b, heads, q, d = queries.shape
        lengths = torch.full((b,), q, device=self.device)
        if exists is not None:
            mine = exists[:, exists.shape[1] - q :]
            queries, lengths = align(queries, mine), mine.sum(dim=1)
        return queries.reshape(b, h, heads // h, q, d), lengths


def align(x: Float[Tensor, "b h n d"], exists: Bool[Tensor, "b n"]) -> Float[Tensor, "b h n d"]:
    """Move padding to the front of each row, keeping the order of the rest."""
    if bool((exists[:, 1:] >= exists[:, :-1]).all()):
        return x
    order = exists.long().argsort(dim=1, stable=True)
    return x.gather(2, order[:, None, :, None].expand_as(x))
