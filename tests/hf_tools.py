"""Small models, feeding them piece by piece, and a brute-force twin that has no cache at all."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

import kvest
from kvest.hf.compat import RELEASE

POLICIES = (
    "uniform/systematic/inclusion@0.3",
    "h2o(values=True)+one_threshold/systematic/tempered(0.85)@0.25",
    "with_certain(h2o(values=True), by=keydiff, share=0.2)+one_threshold/systematic/tempered(0.85)@0.4",
    "snapkv/top_k/none@0.25",
    "mixed(last_query, 0.2)/poisson/inclusion@0.3",
    "capkv/with_replacement/counts@0.3",
)
"""Equal and uneven counts over heads, over layers and over rows; with and without weights."""

HEADS = {"GQA": (6, 2), "MHA": (5, 5), "MQA": (7, 1)}
WINDOW = 16


def sharpen(model: PreTrainedModel, factor: float = 4.0) -> PreTrainedModel:
    """The default initialisation attends almost uniformly; larger weights do not."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(factor)
    return model


def hybrid(*, layers: int = 6, window: int = WINDOW, pattern: Sequence[str] | None = None) -> PreTrainedModel:
    """A random gemma3 in float32: two sliding layers, one full layer, and so on."""
    torch.manual_seed(0)
    kinds = pattern or [("sliding_attention", "sliding_attention", "full_attention")[i % 3] for i in range(layers)]
    config = Gemma3TextConfig(
        vocab_size=101,
        hidden_size=42,
        intermediate_size=48,
        num_hidden_layers=len(kinds),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=4096,
        sliding_window=window,
        layer_types=list(kinds),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return sharpen(Gemma3ForCausalLM(config).eval())


def tokens(generator: torch.Generator, count: int, rows: int = 1) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, 101, (rows, count), generator=generator)


@torch.no_grad()
def feed(model: PreTrainedModel, cache: object, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of the new tokens. `mask` covers all columns so far, as `generate` would pass it, and sets positions."""
    if mask is None:
        return model(ids, past_key_values=cache).logits
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits


def singly(model: PreTrainedModel, cache: object, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """As `feed`, one token at a time."""
    n = ids.shape[1]
    parts = []
    for i in range(n):
        so_far = None if mask is None else mask[:, : mask.shape[1] - n + i + 1]
        parts.append(feed(model, cache, ids[:, i : i + 1], so_far))
    return torch.cat(parts, dim=1)


def prefill_chunks(prompt: Tensor, size: int) -> list[Tensor]:
    """What `generate(prefill_chunk_size=size)` reads at once; transformers 4 reads the last token alone."""
    if RELEASE.major >= 5:
        return list(torch.split(prompt, size, dim=1))
    return [*torch.split(prompt[:, :-1], size, dim=1), prompt[:, -1:]]


def same_entries(report: kvest.Report, row: int, other: kvest.Report, other_row: int, tolerance: float = 1e-5) -> None:
    """Assert that two rows hold the same positions, and the same weights up to `tolerance`."""
    assert report.seen[row] == other.seen[other_row]
    assert report.evictions[row] == other.evictions[other_row]
    assert torch.equal(report.kept[:, row], other.kept[:, other_row])
    for layer, (mine, theirs) in enumerate(zip(report.positions, other.positions, strict=True)):
        for head, (a, b) in enumerate(zip(mine[row], theirs[other_row], strict=True)):
            assert torch.equal(a, b), f"layer {layer}, head {head}: {a.tolist()} and {b.tolist()}"
            weights = report.log_weights[layer][row][head], other.log_weights[layer][other_row][head]
            torch.testing.assert_close(*weights, rtol=0, atol=tolerance)


def living_bytes() -> int:
    """Bytes of all distinct storages of tensors that Python's collector knows and has not frozen."""
    alive = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


# -- the twin: float64, no cache, every entry in place, what was evicted masked out and what was kept weighted


class Pieces:
    """Feeds a model piece by piece and notes what the cache said it held before each piece."""

    def __init__(self, model: PreTrainedModel, cache: kvest.EvictionCache) -> None:
        self.model, self.cache = model, cache
        self.ids: list[Tensor] = []
        self.saw: list[kvest.Report | None] = []
        self.logits: list[Tensor] = []

    def feed(self, ids: Tensor) -> None:
        self.saw.append(self.cache.report() if self.ids else None)
        self.ids.append(ids)
        self.logits.append(feed(self.model, self.cache, ids))

    def check(self, tolerance: float = 2e-5) -> None:
        """Assert that all logits are those of the twin."""
        got = torch.cat(self.logits, dim=1)
        want = twin(self.model, self.ids, self.saw)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * float(want.abs().max()))


@torch.no_grad()
def twin(
    model: PreTrainedModel,
    pieces: Sequence[Tensor],
    saw: Sequence[kvest.Report | None],
    record: dict[tuple[int, int], Tensor] | None = None,
) -> Tensor:
    """Logits of one row when piece n sees the entries and weights of `saw[n]` (None: all), and its own causally.

    `record[layer, query head]` gets the attention probabilities `[q, t]`.
    """
    other = copy.deepcopy(model).double()
    AttentionInterface.register("brute_force", _attention)
    other.set_attn_implementation("brute_force")
    ids = torch.cat(list(pieces), dim=1)
    bias = _bias(model, [piece.shape[1] for piece in pieces], saw)
    return other(ids, bias=bias, record={} if record is None else record, use_cache=False).logits


def _bias(model: PreTrainedModel, sizes: Sequence[int], saw: Sequence[kvest.Report | None]) -> list[Tensor]:
    """`bias[l][h, q, t]`"""
    config, total = model.config, sum(sizes)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    out = []
    for layer, kind in enumerate(kinds):
        bias = torch.full((config.num_key_value_heads, total, total), -torch.inf, dtype=torch.float64)
        start = 0
        for size, report in zip(sizes, saw, strict=True):
            for q in range(start, start + size):
                if kind == "sliding_attention":
                    bias[:, q, max(0, q - config.sliding_window + 1) : q + 1] = 0.0
                    continue
                bias[:, q, start : q + 1] = 0.0
                if report is None:
                    bias[:, q, :start] = 0.0
                    continue
                for head in range(bias.shape[0]):
                    bias[head, q, report.positions[layer][0][head]] = report.log_weights[layer][0][head].double()
            start += size
        out.append(bias)
    return out


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    bias: list[Tensor],
    record: dict[tuple[int, int], Tensor],
    **kwargs: object,
) -> tuple[Tensor, None]:
    """One softmax a query head, in the dtype of the model (float64)."""
    assert mask is None
    heads = []
    for head in range(query.shape[1]):
        own = head * key.shape[1] // query.shape[1]
        logits = kwargs["scaling"] * query[:, head] @ key[:, own].transpose(1, 2) + bias[module.layer_idx][own]
        probabilities = torch.softmax(logits, dim=-1)
        record[module.layer_idx, head] = probabilities[0]
        heads.append(probabilities @ value[:, own])
    return torch.stack(heads, dim=2), None
