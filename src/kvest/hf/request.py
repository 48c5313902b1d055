"""How a model is asked to repeat a document: in tokens, inside its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
HINT = 8
"""Tokens of the chunk before that a later request ends with (kvzip's authors)."""


@dataclass(frozen=True)
class Request:
    """How the model is asked to repeat, in tokens: what a prompt begins with, the requests for the first chunk and for
    later ones, and what ends the user's turn and opens the answer."""

    prefix: list[int]
    first: list[int]
    later: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Request:
        """In the tokenizer's chat template, if it has one."""
        before, after = tokenizer.bos_token or "", "\n"
        if getattr(tokenizer, "chat_template", None) is not None:
            place = "the document"
            chat = [{"role": "user", "content": place}]
            options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
            text = tokenizer.apply_chat_template(chat, **options)
            before, _, after = text.rpartition(place)
        texts = (before, FIRST, LATER, after)
        return cls(*(list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts))

    def start(self, text: Sequence[int]) -> int:
        """How many tokens of a row are the template's and not the document's: those that both begin with."""
        same = [a == b for a, b in zip(text, self.prefix, strict=False)]
        return same.index(False) if False in same else len(same)

    def passes(self, text: Sequence[int], chunk: int) -> list[tuple[int, int, list[int]]]:
        """(start, end, tokens to read) for each chunk of one row's document."""
        found, first = [], self.start(text)
        for start in range(first, len(text), chunk):
            end = min(start + chunk, len(text))
            asked = self.first if start == first else [*self.later, *text[max(start - HINT, first) : start]]
            found.append((start, end, [*asked, *self.suffix, *text[start:end]]))
        return found


def request(model: PreTrainedModel, tokenizer: Any) -> Request:
    """`Request.of` the tokenizer, or of the one that is found where the model was loaded from.

    Raises ValueError where there is none.
    """
    name = getattr(model.config, "_name_or_path", "")
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None and name:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError):
            tokenizer = None
    if tokenizer is None:
        raise ValueError(
            f"cache.prepare asks the model to repeat the document, and found no tokenizer at {name!r} to ask with: "
            "pass tokenizer="
        )
    return Request.of(tokenizer)
