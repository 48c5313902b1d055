"""`kvest compress` and `kvest ask`: a document is read once, and asked as often as you like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import TextStreamer

from kvest.cli.shared import (
    STDERR,
    check_distinct,
    check_writable,
    conditions,
    context_of,
    load_model,
    read,
    read_document,
    write_json,
)
from kvest.eval.compare import answer
from kvest.eval.document import Prompt, PromptTooLong, prompt, question_alone
from kvest.hf import CacheFileError, EvictionCache, cache_header
from kvest.named import NAMED
from kvest.policy import Policy


def compress(
    document: Path, output: Path, policy: str, name: str, seed: int, dtype: str, device: str, json: Path | None
) -> None:
    """Read and evict; the cache goes to `output`, what is held to standard error."""
    chosen = Policy.parse(policy or f"{NAMED['kvest']}@0.25")
    text = read_document(document, option="")
    check_writable(output)
    check_writable(json)
    check_distinct(document, output, json)
    model, tokenizer = load_model(name, dtype, device)
    ids = prompt(tokenizer, text or "", "?", context=context_of(model)).document
    cache = EvictionCache(model, chosen, seed=seed)
    read(cache, ids.to(model.device), tokenizer)
    place = str(Path(name).resolve()) if Path(name).is_dir() else name
    cache.save(output, model=place, document=str(document), ids=ids[0].tolist())
    report = cache.report()
    STDERR.print(Text(str(report), style="dim"))
    STDERR.print(Text(f"written      {output} ({output.stat().st_size / 2**20:.2f} MiB)", style="dim"))
    if json is not None:
        record = {"file": str(output), "file_bytes": output.stat().st_size, "policy": report.policy, "seed": seed}
        held = {"seen": report.seen.tolist(), "kept_bytes": report.kept_bytes, "full_bytes": report.full_bytes}
        write_json(json, {**record, **held, "conditions": conditions(model, name)})


def ask(file: Path, questions: list[str], name: str, max_new_tokens: int, device: str, json: Path | None) -> None:
    """Answer each question from the cache in `file`, which stays as it is."""
    header = cache_header(file)
    if not {"model", "ids"} <= set(header.notes):
        raise CacheFileError(file, "it was not written by kvest compress", "kvest compress DOCUMENT -o FILE writes one")
    if not all(question.strip() for question in questions):
        raise ValueError("a question is empty")
    check_writable(json)
    name = name or header.notes["model"]
    model, tokenizer = load_model(name, header.dtype, device)
    cache = EvictionCache.load(file, model)
    ids = torch.tensor([header.notes["ids"]])
    prompts = [Prompt(ids, question_alone(tokenizer, question)) for question in questions]
    _check_length(prompts, max_new_tokens, context_of(model))
    answers: list[dict[str, Any]] = []
    for question, each in zip(questions, prompts, strict=True):
        if len(questions) > 1:
            STDERR.print(Text(question, style="dim"))
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        with cache.branch():
            said = answer(model, tokenizer, cache, each, max_new_tokens, streamer)
        answers.append({"question": question, "answer": said})
    if json is not None:
        record = {"file": str(file), "policy": header.policy, "seed": header.seed, "answers": answers}
        write_json(json, {**record, "conditions": conditions(model, name)})


def _check_length(prompts: list[Prompt], reserve: int, context: int | None) -> None:
    """Raise PromptTooLong where a question does not fit behind the document."""
    for each in prompts:
        document, question = each.document.shape[1], each.question.shape[1]
        if context is not None and document + question + reserve > context:
            raise PromptTooLong(
                f"the document has {document} tokens and the question {question}; with {reserve} to come that is "
                f"beyond the model's context of {context}: ask a shorter question, or lower --max-new-tokens"
            )
