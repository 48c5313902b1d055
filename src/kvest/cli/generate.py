"""`kvest generate`: one document, one policy, one answer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import TextStreamer

from kvest.cli.shared import STDERR, check_writable, conditions, context_of, load_model, read, read_document, write_json
from kvest.eval.compare import answer
from kvest.eval.document import prompt
from kvest.hf import EvictionCache, Report
from kvest.named import NAMED
from kvest.policy import Policy


def generate(
    policy: str,
    prompt_file: Path | None,
    question: str,
    name: str,
    seed: int,
    max_new_tokens: int,
    dtype: str,
    device: str,
    json: Path | None,
) -> None:
    """Read, evict, ask; the answer streams to standard output."""
    chosen = Policy.parse(policy or f"{NAMED['kvest']}@0.25")
    document = read_document(prompt_file)
    if document is None:
        raise ValueError("nothing to read: give --prompt-file a text file, or - for standard input")
    check_writable(json)
    model, tokenizer = load_model(name, dtype, device)
    parts = prompt(tokenizer, document, question, context=context_of(model), reserve=max_new_tokens)
    if parts.question.shape[1] == 0:
        raise ValueError("nothing to ask: this model has no chat template, so give it a --question")
    cache = EvictionCache(model, chosen, seed=seed)
    read(cache, parts.document.to(model.device), tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    said = answer(model, tokenizer, cache, parts, max_new_tokens, streamer)
    report = cache.report()
    STDERR.print(Text(str(report), style="dim"))
    if json is not None:
        write_json(json, {"answer": said, "report": _plain(report), "conditions": conditions(model, name)})


def _plain(report: Report) -> dict[str, Any]:
    """The report as plain values."""

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.tolist()
        return [plain(each) for each in x] if isinstance(x, list) else x

    return {key: plain(value) for key, value in asdict(report).items()}
