"""Reading a document with more passes before the first eviction: the model repeats it, and its attention scores it.

The passes leave nothing behind. Every row is repeated alone, so that padding stands in front of it and nowhere else.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvest.hf import compat
from kvest.hf.branch import Mark
from kvest.hf.layer import EvictionLayer
from kvest.hf.request import Request, request
from kvest.observe import attended, query_weights
from kvest.types import Observation

if TYPE_CHECKING:
    from kvest.hf.cache import EvictionCache

Tick = Callable[[int, int], None]
"""`tick(passes done, passes in all)`"""


def prepare(
    cache: EvictionCache,
    model: PreTrainedModel,
    ids: Int[Tensor, "b t"],
    attention_mask: Int[Tensor, "b t"] | None,
    tokenizer: Any,
    progress: bool,
) -> Float[Tensor, "b v"]:
    """Read `ids`, repeat them where the policy asks for it, evict; the logits of the last tokens."""
    session = cache.session
    if session.columns > 0:
        raise ValueError(
            f"cache.prepare reads a document into an empty cache, and this one has seen {session.columns} tokens: "
            "call cache.reset(), or make a new one"
        )
    asked = request(model, tokenizer) if session.policy.propose.extra_passes else None
    mark = Mark(cache)
    try:
        with torch.no_grad(), _bar(progress and asked is not None, ids.shape[1]) as tick:
            session.puts_off = asked is not None
            logits: Tensor = read(model, cache, ids, attention_mask)[:, -1]
            if asked is not None:
                repeat_and_evict(cache, model, ids, attention_mask, asked, tick)
    except BaseException:
        mark.back(cache)
        session.puts_off, session.listener = False, None
        raise
    return logits


def read(
    model: PreTrainedModel, cache: EvictionCache, ids: Int[Tensor, "b n"], attention_mask: Int[Tensor, "b _"] | None
) -> Float[Tensor, "b _ v"]:
    """A pass through `cache`; logits of (at least) the last tokens. The mask covers all columns so far."""
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
        if "position_ids" in known:
            options["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    out: Tensor = model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache}, **options).logits
    return out


def repeat_and_evict(
    cache: EvictionCache,
    model: PreTrainedModel,
    ids: Int[Tensor, "b t"],
    attention_mask: Int[Tensor, "b t"] | None,
    asked: Request,
    tick: Tick = lambda done, total: None,
) -> None:
    """The rest of `prepare` for a cache that has read `ids` and put its eviction off."""
    session = cache.session
    session.puts_off = False
    layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    due = session.overdue(layers[0].keys, layers[0].values)
    exists = torch.ones_like(ids).bool() if attention_mask is None else attention_mask.bool()
    scores = _scores(cache, model, ids, exists, due, asked, tick) if any(due) else {}
    session.begin_late()
    session.plan(layers[0].keys, layers[0].values)
    for layer in layers:
        layer.prepared = scores.get(layer.index)
        layer.evict_late()


def _scores(
    cache: EvictionCache,
    model: PreTrainedModel,
    ids: Int[Tensor, "b t"],
    exists: Bool[Tensor, "b t"],
    due: list[bool],
    asked: Request,
    tick: Tick,
) -> dict[int, Float[Tensor, "b h t"]]:
    """Scores of each evicted layer's columns; 1 where nothing is repeated."""
    layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    scores = {x.index: torch.ones(x.keys.shape[:3], dtype=torch.float32, device=x.device) for x in layers}
    todo = []
    for row in (row for row in range(len(due)) if due[row]):
        columns = exists[row].nonzero()[:, 0]
        text = ids[row][columns].tolist()
        fixed = max(asked.start(text), cache.session.policy.sinks)
        for start, end, tokens in asked.passes(text, cache.session.policy.propose.extra_passes):
            mine = {index: score[row] for index, score in scores.items()}
            todo.append((row, tokens, Listener(columns, min(fixed, start), start, end, mine)))
    _check_context(model, [len(listener.columns) + len(tokens) for _, tokens, listener in todo])
    for done, (row, tokens, listener) in enumerate(todo):
        tick(done, len(todo))
        with cache.branch():
            if len(due) > 1:
                cache.batch_select_indices(torch.tensor([row], device=ids.device))
            listener.held = {layer.index: (layer.keys, layer.values) for layer in layers}
            _listen(cache, model, listener, tokens, exists[row : row + 1])
    tick(len(todo), len(todo))
    return scores


def _listen(
    cache: EvictionCache, model: PreTrainedModel, listener: Listener, tokens: list[int], exists: Bool[Tensor, "1 t"]
) -> None:
    """One pass over one row that `listener` hears."""
    ids = torch.tensor([tokens], device=exists.device)
    mask = None if bool(exists.all()) else torch.cat([exists.long(), torch.ones_like(ids)], dim=1)
    cache.session.listener = listener
    try:
        read(model, cache, ids, mask)
    finally:
        cache.session.listener = None


@dataclass
class Listener:
    """What the queries of one pass over one row pay to the tokens that they repeat, `start` to `end` of the row's.

    `columns` are where the row's tokens stand in the batch; the first `before` of them are in every softmax. Scores go
    to `scores` of each layer; `held` is what each holds without the pass, and what it is given back.
    """

    columns: Int[Tensor, "n"]
    before: int
    start: int
    end: int
    scores: dict[int, Float[Tensor, "h t"]]
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: EvictionLayer, queries: Float[Tensor, "1 hg q d"], scale: float) -> None:
        keys, (q, d) = layer.keys, queries.shape[2:]
        h, total = keys.shape[1:3]
        mine = self.columns.to(keys.device)
        repeated = mine[self.start : self.end]
        own = torch.arange(total - q, total, device=keys.device)
        keys = keys.index_select(2, torch.cat([mine[: self.before], repeated, own]))
        observation = alone(queries.view(1, h, -1, q, d), keys, scale)
        score = attended(observation, query_weights(observation))
        self.scores[layer.index][:, repeated] = score[0, :, self.before : self.before + len(repeated)]
        layer.keys, layer.values = self.held[layer.index]


def alone(queries: Float[Tensor, "1 h g q d"], keys: Float[Tensor, "1 h t d"], scale: float) -> Observation:
    """One row without padding, whose last entries are the queries' own, and the largest attention is asked for."""
    h, t, device = keys.shape[1], keys.shape[2], keys.device
    one = torch.tensor([t], device=device)
    return Observation(
        queries=queries,
        keys=keys,
        values=keys[..., :0],
        log_weights=torch.zeros(1, 1, 1, device=device).expand(1, h, t),
        positions=torch.arange(t, device=device).expand(1, h, t),
        lengths=one[:, None].expand(1, h),
        query_lengths=torch.tensor([queries.shape[3]], device=device),
        seen=one,
        budget=one,
        due=torch.ones(1, dtype=torch.bool, device=device),
        scale=scale,
        reduction="max",
    )


def _check_context(model: PreTrainedModel, positions: list[int]) -> None:
    """Warn where the repetition reaches beyond the positions that the model was made for."""
    most = getattr(compat.text_config(model), "max_position_embeddings", None)
    if most is not None and max(positions, default=0) > most:
        warnings.warn(
            f"repeating the document takes {max(positions)} positions, beyond the model's context of {most}: a smaller "
            "chunk takes fewer, as in kvzip(512)",
            stacklevel=5,
        )


@contextmanager
def _bar(show: bool, tokens: int) -> Iterator[Tick]:
    """A progress bar on standard error."""
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading {tokens:,} tokens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description="repeating")
