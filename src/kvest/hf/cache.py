"""`EvictionCache`: a transformers cache that evicts, corrects, and counts its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvest.hf import attention, calibration, compat, parallel, storage
from kvest.hf import prepare as preparing
from kvest.hf.branch import Mark
from kvest.hf.layer import EvictionLayer
from kvest.hf.report import Report, make_report, merge
from kvest.hf.session import Session
from kvest.policy import Policy


class EvictionCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A cache for `model.generate(..., past_key_values=cache)` that is evicted as `policy` says.

    The same seed and prompt give the same cache, whatever the batch. Making one sets the name of the model's attention
    implementation (`kvest.detach(model)` gives the old one back), and nothing else anywhere. Layers that are bounded
    already (sliding window, linear attention) keep their stock cache.

    Raises UnsupportedModel (a ValueError) for a model that cannot be evicted rightly, with the reason and the way out,
    PolicyError for a policy that cannot be read, and CalibrationError where the policy needs a table that nobody made.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy | str, seed: int = 0) -> None:
        policy = Policy.parse(policy) if isinstance(policy, str) else policy
        compat.check(model)
        layers, evictable = compat.stock_layers(model)
        rotations = compat.rotations(model)
        if policy.propose.needs_rotation and any(rotations[index] is None for index in evictable):
            raise compat.UnsupportedModel(
                model,
                f"{policy.propose} undoes the rotary embedding, and its is of a kind that kvest does not know",
                "Use another proposal",
            )
        windows = sum(getattr(layer, "sliding_window", 0) for layer in layers)
        config = compat.text_config(model)
        share = parallel.share(model)
        method = policy.allocate.needs_calibration
        importance = None if method is None else calibration.importance(model, method)
        self.session = Session(model, policy, int(seed), config, evictable, rotations, importance, windows, share)
        for index in evictable:
            layers[index] = EvictionLayer(index, self.session)
        super().__init__(layers=layers)
        compat.attach(model, attention.attention, attention.mask)

    @property
    def policy(self) -> Policy:
        """What is kept, and when."""
        return self.session.policy

    def report(self, all_processes: bool = False) -> Report:
        """What is held now: entries, positions and weights of every head, bytes. Prints as a small table.

        Where heads are split over processes: of this one, or of all of them together, if all of them ask.
        """
        report = make_report(self.layers, self.session)
        share = self.session.share
        return merge(share.gather_values(report)) if all_processes and share.size > 1 else report

    @compat.between_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in a stock cache; a bounded layer lets go of what its window does not need."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictionLayer):
            for name in ("keys", "values"):  # stock sliding layers keep a view of the whole prompt until the next token
                held = getattr(layer, name, None)
                if isinstance(held, Tensor) and held.untyped_storage().nbytes() > 1.1 * held.nbytes:
                    setattr(layer, name, held.clone())
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included, as position ids and attention masks count; `report().kept` is what is held."""
        return int(super().get_seq_length(layer_idx))

    def prepare(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Tensor | None = None,
        *,
        tokenizer: Any = None,
        progress: bool = True,
    ) -> Float[Tensor, "b v"]:
        """Read a document into this empty cache and evict it, before `generate` continues it: the last tokens' logits.

        For a proposal like `kvzip` the model then repeats the document, chunk by chunk, in as many passes more, under a
        progress bar; `tokenizer` says how to ask for that (default: the one that lies where the model was loaded from).
        For all others this is the prompt's own pass, and no more. After an error the cache is empty.

        Raises ValueError for a cache that has read tokens before, and where a tokenizer is needed and not found.
        """
        model = self.session.model()
        if model is None:
            raise RuntimeError("this cache's model is gone: read the document before you drop the model")
        return preparing.prepare(self, model, input_ids, attention_mask, tokenizer, progress)

    def save(self, path: str | os.PathLike[str], **notes: Any) -> None:
        """Write everything that is held to a file, atomically, with `notes` (plain values) in its header.

        The file is safetensors; its header names policy, seed, tokens seen, versions, and a fingerprint of the model.
        Decoding after `EvictionCache.load` is decoding without, bit for bit.

        Raises RuntimeError after a pass that failed, ValueError for notes that are not plain or a cache whose heads are
        split over processes, OSError where the file cannot be written.
        """
        model = self.session.model()
        if model is None:
            raise RuntimeError(
                "this cache's model is gone, and its fingerprint with it: save before you drop the model"
            )
        if self.session.share.size > 1:
            raise ValueError(
                "this cache's heads are split over processes, and one file would hold those of one process: read "
                "the document in one process to save it"
            )
        storage.save(self, model, path, notes)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel) -> EvictionCache:
        """The cache that was saved, on the devices of `model`.

        Raises CacheFileError (a ValueError) for a file that is missing, cut off, foreign or changed, for another model,
        and for the same one in another dtype.
        """
        return storage.load(path, model)

    @contextmanager
    def branch(self) -> Iterator[EvictionCache]:
        """`with cache.branch(): ...` returns the cache to where it was, also after an error; branches may be nested.

        What the cache holds is not copied: going back costs as much as what was appended in between. (The first branch
        may move the entries of a cache once, to make room behind them.) Logits of later tokens agree with those of a
        cache that was never branched up to rounding, the entries exactly.
        """
        mark = Mark(self)
        self.session.marks.append(mark)
        try:
            yield self
        finally:
            self.session.marks.remove(mark)
            mark.back(self)

    def reset(self) -> None:
        """Empty the cache for another prompt."""
        self.session.reset()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens (a negative number), as far as they are newer than the last eviction.

        Up to transformers 5.10 a positive number, as there, says how many to leave.

        Raises ValueError beyond that.
        """
        if tokens_to_remove > 0 and compat.CROP_KEEPS:
            tokens_to_remove = min(tokens_to_remove - self.get_seq_length(), 0)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        if tokens_to_remove < 0:
            if self.session.marks:
                self.session.marks[-1].check_crop(self, -tokens_to_remove)
            for index, layer in enumerate(self.layers):
                window = getattr(layer, "sliding_window", None)
                if not isinstance(layer, EvictionLayer) and (window is None or layer.get_seq_length() >= window):
                    raise ValueError(
                        f"cannot take back {-tokens_to_remove} tokens: layer {index} ({type(layer).__name__}) has let "
                        "go of what came before them"
                    )
            self.session.crop(-tokens_to_remove)
            super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Assisted decoding calls this before its first draft, which it will take back with `crop`.

        Raises ValueError where an eviction could come between, or a bounded layer let go of what it would need.
        """
        self.session.expect_drafts()
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, EvictionLayer):
                raise ValueError(
                    f"assisted decoding takes drafts back, and layer {index} ({type(layer).__name__}) lets go of what "
                    "came before them. Leave out assistant_model and prompt_lookup_num_tokens"
                )
        super().activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.session.select(beam_idx.tolist())

    def _check_rows(self, method: str) -> None:
        """Raise before any layer has changed where one of them cannot do it."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                raise ValueError(
                    f"{method}: layer {index} ({type(layer).__name__}) of transformers cannot repeat or select rows. "
                    "Read the prompt with as many rows as you need"
                )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_rows("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)
        self.session.select([row for row in range(len(self.session.seen)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._check_rows("batch_select_indices")
        super().batch_select_indices(indices)
        self.session.select(torch.arange(len(self.session.seen), device=indices.device)[indices].tolist())
