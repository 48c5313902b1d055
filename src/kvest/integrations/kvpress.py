"""Scorer presses of kvpress as proposals: any of their methods gains random designs, a correction, and real memory.

    from kvpress import SnapKVPress
    from kvest.integrations.kvpress import proposal

    policy = Policy(proposal(SnapKVPress()), Systematic(), Tempered(0.85), Fraction(0.25), OneThreshold())

A press scores from a module of the model and its hidden states. It is given a stand-in that holds what it would have
computed from them: queries and keys as they were before the rotary embedding, which is undone exactly. The model is
neither run again nor touched. kvpress itself is imported by whoever makes the press.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvest.propose import Propose
from kvest.types import Observation, Proposal


def proposal(press: Any, to: Literal["shift", "softmax"] = "shift") -> KVPress:
    """The scores of a press as a proposal. Raises ValueError for a press that is no scorer.

    Scores may be negative: `to="shift"` subtracts each head's smallest, `to="softmax"` exponentiates. Both keep their
    order, so that `top_k` keeps what the press would; a random design draws in proportion to them.
    """
    return KVPress(press, to)


@dataclass(frozen=True)
class KVPress(Propose):
    """score_i = the press's score of entry i, minus the head's smallest (or its softmax)

    The press's own `compression_ratio` is replaced by that of the policy's budget, for presses that read it. What a
    press protects by a large score (its window, its sinks) is likely to stay, and certain to under `top_k`.
    Source: kvpress, whose version is the one installed.
    Unlike there: scores are computed row by row, without padding, in float32.
    """

    press: Any = field(hash=False)
    to: Literal["shift", "softmax"] = "shift"

    def __post_init__(self) -> None:
        name = type(self.press).__name__
        bases = {kind.__name__ for kind in type(self.press).__mro__}
        if "ScorerPress" not in bases:
            raise ValueError(
                f"{name} gives no scores: pass a scorer press (SnapKVPress(), KnormPress(), ...) and let a policy say "
                "what is kept of it; its way of sharing a budget over heads is an allocation here (kvest ls "
                "allocations)"
            )
        if "ObservedAttentionPress" in bases:
            raise ValueError(
                f"{name} needs the whole attention matrix, which kvest never makes: h2o is the same score, blockwise"
            )
        if self.to not in ("shift", "softmax"):
            raise ValueError(f"kvpress scores are taken to='shift' or to='softmax', not {self.to!r}")

    @property
    def queries(self) -> int | None:
        return None

    @property
    def needs_output(self) -> bool:  # type: ignore[override]  # depends on the press
        return "CriticalKVPress" in {kind.__name__ for kind in type(self.press).__mro__}

    def __call__(self, observation: Observation) -> Proposal:
        score = torch.zeros_like(observation.log_weights, dtype=torch.float32)
        for row, length in enumerate(observation.seen.tolist()):
            if int(observation.lengths[row].min()) < length or int(observation.query_lengths[row]) < length:
                raise ValueError(
                    f"{type(self.press).__name__} scores a prompt as a whole, and this row has been evicted before (or "
                    "was read in chunks): leave out every=N, and read the prompt in one pass"
                )
            if length > 0:
                score[row, :, score.shape[2] - length :] = self._scored(observation, row, length)
        valid = observation.valid
        certain = valid & (score > torch.finfo(score.dtype).max / 2)  # how some mark what must stay
        score = score.masked_fill(certain, 0.0)
        if self.to == "softmax":
            score = torch.softmax(score.masked_fill(~valid, -torch.inf), dim=-1)
        else:
            score = score - score.masked_fill(~valid, torch.inf).amin(dim=-1, keepdim=True)
        return Proposal(score.masked_fill(~valid, 0.0), certain)

    def _scored(self, observation: Observation, row: int, length: int) -> Float[Tensor, "h t"]:
        """One row's scores; `length` entries, all with their queries."""
        keys, values = (x[row : row + 1, :, -length:].float() for x in (observation.keys, observation.values))
        queries = observation.queries[row : row + 1, :, :, -length:].flatten(1, 2).float()
        module, hidden, embeddings = _stand_in(observation, queries, keys)
        press = copy.deepcopy(self.press)
        press.compression_ratio = 1.0 - min(int(observation.budget[row]), length) / length
        score: Tensor = press.score(module, hidden, keys, values, None, {"position_embeddings": embeddings})
        return score[0].float()


def _stand_in(
    observation: Observation, queries: Float[Tensor, "1 n t d"], keys: Float[Tensor, "1 h t d"]
) -> tuple[SimpleNamespace, Float[Tensor, "1 t c"], tuple[Tensor, Tensor] | None]:
    """(a module, hidden states, (cos, sin)): the module's projections take queries and keys out of the hidden states"""
    rotation = observation.rotation
    _, heads, t, d = queries.shape
    kv_heads = keys.shape[1]
    positions = torch.arange(t, device=keys.device)
    hidden = keys.new_zeros(1, t, 0)
    embeddings = None
    if rotation is not None:
        before = [rotation.undo(x, positions).transpose(1, 2).flatten(2) for x in (queries, keys)]
        hidden = torch.cat(before, dim=-1)
        cos, sin = rotation.at(positions)
        embeddings = cos[None], sin[None]

    def projection(part: slice) -> Any:
        def project(x: Tensor) -> Tensor:
            if x.shape[-1] == 0:
                raise ValueError("this press undoes the rotary embedding, and the model's is of an unknown kind")
            return x[..., part]

        return project

    def rotary(_: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if rotation is None:
            raise ValueError("this press asks for the rotary embedding, and the model's is of an unknown kind")
        cos, sin = rotation.at(position_ids)
        return cos, sin

    config = SimpleNamespace(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=observation.layers,
        head_dim=d,
        hidden_size=heads * d,
        _attn_implementation="sdpa",
    )
    module = SimpleNamespace(
        config=config,
        head_dim=d,
        num_key_value_groups=heads // kv_heads,
        layer_idx=observation.layer,
        q_proj=projection(slice(0, heads * d)),
        k_proj=projection(slice(heads * d, None)),
        rotary_emb=rotary,
    )
    if observation.output is not None:
        output = observation.output.float()
        config.hidden_size = output.shape[2]
        module.o_proj = SimpleNamespace(weight=output.permute(2, 0, 1, 3).flatten(1))
    return module, hidden, embeddings
