"""`kvest compare`: policies side by side on one prompt."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel

from kvest.cli.shared import STDERR, check_writable, conditions, context_of, load_model, read_document, write_json
from kvest.eval.compare import CONTINUATION, Row
from kvest.eval.compare import compare as rows_of
from kvest.eval.document import FACT, QUESTION, prompt, speech
from kvest.hf.calibration import CalibrationError, find
from kvest.named import DEMO, DEMO_KEEP
from kvest.policy import Policy


def compare(
    policies: list[str],
    prompt_file: Path | None,
    question: str,
    name: str,
    seed: int,
    max_new_tokens: int,
    dtype: str,
    device: str,
    json: Path | None,
) -> None:
    """Measure, show a progress bar meanwhile, print one table."""
    sentences = policies or [f"{sentence}@{keep}" for keep in DEMO_KEEP for sentence in DEMO]
    chosen = [Policy.parse(sentence) for sentence in sentences]
    for policy in chosen:
        if policy.every is not None:
            raise ValueError(f"compare evicts once, after the document: leave every={policy.every} out of {policy}")
    given = read_document(prompt_file)
    if given is not None and not question:
        raise ValueError("compare asks about the document: give --question with --prompt-file")
    check_writable(json)
    model, tokenizer = load_model(name, dtype, device)
    if not policies:
        chosen = [policy for policy in chosen if _has_table(model, policy)]
    document = speech(tokenizer) if given is None else given
    asked = question or QUESTION
    parts = prompt(tokenizer, document, asked, context=context_of(model), reserve=max(max_new_tokens, CONTINUATION))
    tokens = parts.document.shape[1]
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=STDERR, transient=True) as progress:
        reading = progress.add_task(f"reading {tokens:,} tokens", total=None)
        task = progress.add_task("comparing", total=len(chosen) + 1)
        found = rows_of(
            model,
            tokenizer,
            parts,
            chosen,
            seed=seed,
            max_new_tokens=max_new_tokens,
            on_read=lambda: progress.update(reading, total=1, completed=1),
        )
        for row in found:
            rows.append(row)
            progress.update(task, advance=1, description=f"comparing {row.policy.split('/')[0][:40]}")
    _show(rows, tokens, asked, FACT if given is None else None, name, seed)
    if json is not None:
        facts = {"document_tokens": tokens, "question": asked, "fact": FACT if given is None else None, "seed": seed}
        write_json(json, {**facts, "conditions": conditions(model, name), "rows": [row.record() for row in rows]})


def _has_table(model: PreTrainedModel, policy: Policy) -> bool:
    """Whether the model's heads were measured, where the policy asks for it; if not, says so."""
    if policy.allocate.needs_calibration is None:
        return True
    try:
        find(model, policy.allocate.needs_calibration)
    except CalibrationError as error:
        STDERR.print(f"left out: {policy} ({error})", highlight=False, markup=False, soft_wrap=True)
        return False
    return True


def _show(rows: list[Row], tokens: int, question: str, fact: str | None, name: str, seed: int) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(title=f"{name}: {tokens:,} tokens read and evicted, then asked: {question}", title_justify="left")
    table.add_column("policy", overflow="fold", ratio=3)
    for heading in ("kept per head", "MiB held", "KL (nats/token)", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer", overflow="fold", ratio=2)
    for row in rows:
        spread = "" if row.kept_min == row.kept_max else f" ({row.kept_min}-{row.kept_max})"
        kl = "0" if row.kl_nats == 0 else f"{row.kl_nats:.3f} ± {row.kl_error:.3f}"
        found = fact is not None and fact.split(": ")[-1].rstrip(".") in row.answer
        mark = "[green]✓[/green] " if found else ""
        table.add_row(
            row.policy,
            f"{row.kept_mean:,.0f}{spread}",
            f"{row.kept_bytes / 2**20:.1f}" + (f" + {row.elsewhere_bytes / 2**20:.1f}" if row.elsewhere_bytes else ""),
            kl,
            f"{row.tokens_per_s:.1f}",
            mark + row.answer.replace("[", "\\["),
        )
    console.print(table)
    console.print(
        f"KL(full || evicted) of the next token over {rows[0].kl_tokens} tokens of the full cache's own greedy "
        f"continuation of the document, ± standard error over tokens; one document, seed {seed}."
        + (" Behind the +: evicted entries that are kept elsewhere." if any(r.elsewhere_bytes for r in rows) else "")
        + (f" Hidden in the document: {fact} ✓ marks answers that have it." if fact else ""),
        style="dim",
        highlight=False,
    )
