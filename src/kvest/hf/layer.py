"""One layer of an `EvictionCache`: a stock cache layer until the first eviction, a `Store` afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvest.attend import attend
from kvest.hf import compat, elsewhere
from kvest.hf.observe import observe
from kvest.hf.session import Session
from kvest.random import Stream
from kvest.retain import Store
from kvest.types import Observation, Proposal, Retained

ATTRIBUTE = "_kvest_layer"
"""Set on the keys that `update` returns: this is how the attention function finds its layer."""


def own(x: Tensor) -> Tensor:
    """`x` without what else its storage holds: a layer must not keep queries alive for a view of the keys."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


class MaskLength(int):
    """A number of entries that knows whose it is: this is how the mask function finds its session."""

    session: Session
    columns: int


class EvictionLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer; appends in `update`, attends and observes in `attend`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, index: int, session: Session) -> None:
        super().__init__()
        self.index, self.session = index, session
        self.module: weakref.ref[nn.Module] | None = None  # the attention module that this layer belongs to
        self.reset()

    def reset(self) -> None:
        self.keys: Any = None  # tensors until the first eviction
        self.values: Any = None
        self.is_initialized = False
        self.columns = 0
        self.store: Store | None = None
        self.queries: list[Float[Tensor, "b hg n d"]] = []
        self.normalizers: Float[Tensor, "b hg n"] | None = None  # of these queries, as long as they are of one pass
        self.observed: tuple[Observation, Proposal] | None = None
        self.prepared: Float[Tensor, "b h t"] | None = None  # scores made by passes before the first eviction

    # -- what transformers asks of a layer

    @property
    def is_croppable(self) -> bool:
        return self.session.policy.every is None and not self.session.evicted

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

    @compat.between_graphs  # which would take the length for any number
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
                f"kvest's attention never saw the keys of layer {session.waiting}: the model does something to them "
                "between cache and attention that kvest does not know. Use the stock cache for it"
            )
        step = session.plan(key_states, value_states)
        exists = None if step.exists is None else step.exists.to(key_states.device)
        session.waiting = self.index
        self.columns += key_states.shape[2]
        if self.store is None:
            grown = self.keys is not None
            self.keys = torch.cat([self.keys, key_states], dim=2) if grown else own(key_states)
            self.values = torch.cat([self.values, value_states], dim=2) if grown else own(value_states)
            keys, values = self.keys.view_as(self.keys), self.values
        else:
            self.store.append(key_states, value_states, session.positions(key_states.device), exists)
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
        self.normalizers = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens (a negative number); the session has checked that they are whole."""
        count = -tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return
        self.columns -= count
        if self.store is not None:
            self.store.cut([n - count for n in self.store.lengths])
        else:
            self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]
        if self.queries:
            self.queries = [torch.cat(self.queries, dim=2)[:, :, :-count]]
        self.normalizers = None

    # -- what kvest does

    def mark(self) -> dict[str, Any]:
        """What `back` needs to return here. Nothing is copied: slots that are taken are never written to again."""
        names = ("keys", "values", "is_initialized", "columns", "store")
        lengths, elsewhere = (None, None) if self.store is None else (list(self.store.lengths), self.store.elsewhere)
        held = {name: getattr(self, name) for name in names}
        return {**held, "queries": list(self.queries), "lengths": lengths, "elsewhere": elsewhere}

    def back(self, mark: dict[str, Any]) -> None:
        """Return to where `mark` was made."""
        held = {name: x for name, x in mark.items() if name not in ("lengths", "elsewhere")}
        self.__dict__.update(held, observed=None, prepared=None, normalizers=None)
        if self.store is not None:
            self.store.cut(mark["lengths"])
            self.store.elsewhere = mark["elsewhere"]

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(plain values, tensors) from which `load` makes an equal layer."""
        if not self.is_initialized:
            return {}, {}
        tensors = {} if not self.queries else {"queries": torch.cat(self.queries, dim=2)}
        values: dict[str, Any] = {"columns": self.columns, "token_bytes": self.token_bytes}
        if self.store is None:
            return values, {**tensors, "keys": self.keys, "values": self.values}
        held = self.store.retained()
        names = ("keys", "values", "log_weights", "positions", "history", "slopes")
        tensors |= {name: x for name in names if (x := getattr(held, name)) is not None}
        values |= {"counts": held.counts, "capacities": self.store.capacities}
        if held.elsewhere is not None:
            away, more = elsewhere.pack(held.elsewhere)
            values, tensors = {**values, "elsewhere": away}, {**tensors, **more}
        return values, tensors

    def load(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Become the layer that `saved` described."""
        self.reset()
        if not values:
            return
        self.columns, self.token_bytes = values["columns"], values["token_bytes"]
        self.device, self.dtype, self.is_initialized = tensors["keys"].device, tensors["keys"].dtype, True
        self.queries = [tensors.pop("queries")] if "queries" in tensors else []
        if "counts" not in values:
            self.keys, self.values = tensors["keys"], tensors["values"]
            return
        away = None
        if "elsewhere" in values:
            away = elsewhere.unpack(values["elsewhere"], tensors, self.session.policy.stand_in)
        tensors = {name: x for name, x in tensors.items() if "." not in name}
        counts = tuple(tuple(row) for row in values["counts"])
        self.store = Store(Retained(**tensors, counts=counts, elsewhere=away))
        if self.store.capacities != values["capacities"]:
            self.store.make_room(values["capacities"])

    def attend(
        self,
        queries: Float[Tensor, "b hg q d"],
        scale: float,
        exact: Callable[[], tuple[Tensor, Tensor | None]],
        sinks: Float[Tensor, "hg"] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the new tokens; then evict, if the layer is due. `exact` computes it as without kvest.

        `sinks` are learned logits without a value, one per query head. They join the softmax over what is held;
        proposals and corrections compare entries with one another, by probabilities that leave them out.
        """
        session = self.session
        step = session.planned()
        looked_at = self.session.policy.propose.queries is None and (any(step.due) or session.remembers)
        if self.store is None and self.columns == step.tokens and looked_at:
            with compat.Normalizers() as found:
                output = exact()
            self.normalizers = found.of(queries) if self.normalizers is None else self.normalizers
        elif self.store is None:
            output, self.normalizers = exact(), None
        else:
            exists = None if step.exists is None else step.exists.to(queries.device)
            output = attend(queries, self.store, scale, exists, sinks).transpose(1, 2).contiguous(), None
        session.waiting = None
        self.scale, self.query_heads = scale, queries.shape[1]
        with torch.no_grad():
            if session.listener is not None:
                session.listener(self, queries, scale)
            elif any(step.due) or session.remembers:
                self.queries.append(queries.detach())
                self._forget_old_queries()
            if any(step.due):
                self._propose(scale)
        return output

    def _forget_old_queries(self) -> None:
        """Keep what the policy looks at: of a proposal with a window, that many real queries of every row."""
        limit = self.session.policy.queries
        if limit is None:
            return
        total = sum(query.shape[2] for query in self.queries)
        watched = self.session.planned().watched
        if watched is not None and limit > 0:
            since = watched.flip(1).cumsum(dim=1)  # a row's queries in the latest columns
            enough = since[:, -1:].clamp(max=limit)
            limit = int((since < enough).sum(dim=1).max()) + 1
        if limit == 0:
            self.queries = []
        elif total > limit:
            self._keep_queries(limit)

    def _keep_queries(self, columns: int) -> None:
        """The queries of at most this many latest columns."""
        if columns == 0 or not self.queries:
            self.queries = []
            return
        joined = torch.cat(self.queries, dim=2) if len(self.queries) > 1 else self.queries[0]
        self.queries = [joined[:, :, max(joined.shape[2] - columns, 0) :]]

    def _propose(self, scale: float) -> None:
        policy = self.session.policy
        observation = observe(self, scale)
        proposal = policy.proposal(observation)
        looked_at = observation.recent(policy.looks_back)
        self.observed = (replace(looked_at, queries=own(looked_at.queries)), proposal)
        self._keep_queries(self.session.planned().left_columns)
        self.normalizers = None

    def evict_late(self) -> None:
        """Evict by all that was read, now that `prepare` has run its passes."""
        if any(self.session.planned().due):
            self._propose(self.scale)
        else:
            self.queries, self.normalizers = [], None
        self.session.after(self)

    def evict(self, counts: Int[Tensor, "b h"]) -> None:
        """Hold so many entries of what was observed, and nothing else."""
        if self.observed is None:
            raise RuntimeError(f"layer {self.index} has observed nothing that could be evicted")
        session = self.session
        stream = Stream(session.seed, self.index, tuple(session.rounds), session.share.first_head)
        self.store = Store(session.policy.keep(*self.observed, counts, stream))
        self.keys = self.values = self.observed = self.prepared = None
