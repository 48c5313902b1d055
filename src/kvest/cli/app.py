"""`kvest generate`, `kvest compare`, `kvest compress`, `kvest ask`, `kvest calibrate`, `kvest ls`, `kvest explain`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Evict most of a transformer's KV cache, correct for what is gone, and see what it cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


class Dtype(StrEnum):
    """What the model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Method(StrEnum):
    """How the importance of heads is measured."""

    gradient = "gradient"
    damage = "damage"


class Kind(StrEnum):
    """What there is a list of."""

    proposals = "proposals"
    allocations = "allocations"
    designs = "designs"
    corrections = "corrections"
    stand_ins = "stand-ins"
    policies = "policies"


Model = Annotated[str, typer.Option(help="A folder, a hub name, or an embedded model: smollm2, gemma3-270m.")]
PromptFile = Annotated[Path | None, typer.Option(help="The document, a text file; - reads standard input.")]
Question = Annotated[str, typer.Option(help="Asked after the document was read and evicted.")]
Seed = Annotated[int, typer.Option(help="Of the random designs: same seed, same cache.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Length of an answer, at most.")]
DtypeOption = Annotated[Dtype, typer.Option(help="What the model computes in.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file as well.")]

POLICY_HELP = "PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]@BUDGET, e.g. snapkv/top_k/none@0.25."


@app.command()
def generate(
    policy: Annotated[str, typer.Option(help=f"{POLICY_HELP} Default: kvest's own, at 0.25.")] = "",
    prompt_file: PromptFile = None,
    question: Question = "",
    model: Model = "smollm2",
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Read a document, evict, ask; the answer goes to standard output, what was held to standard error."""
    from kvest.cli.generate import generate as command

    command(policy, prompt_file, question, model, seed, max_new_tokens, dtype.value, device, json)


@app.command()
def compare(
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{POLICY_HELP} May be repeated. Default: eight policies at 0.5 and 0.25.")
    ] = None,
    prompt_file: PromptFile = None,
    question: Question = "",
    model: Model = "smollm2",
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 32,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Policies side by side: entries and bytes kept, the answer, KL to the full cache, decode speed.

    Without --prompt-file: a State of the Union speech of 3,000 tokens with a fact hidden in it, and a question.
    """
    from kvest.cli.compare import compare as command

    command(policy or [], prompt_file, question, model, seed, max_new_tokens, dtype.value, device, json)


@app.command()
def compress(
    document: Annotated[Path, typer.Argument(help="A text file; - reads standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The cache file to write.")],
    policy: Annotated[str, typer.Option(help=f"{POLICY_HELP} Default: kvest's own, at 0.25.")] = "",
    model: Model = "smollm2",
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Read a document, evict, and keep the cache in a file: `kvest ask` answers from it, as often as you like."""
    from kvest.cli.compress import compress as command

    command(document, output, policy, model, seed, dtype.value, device, json)


@app.command()
def ask(
    file: Annotated[Path, typer.Argument(help="A cache file from `kvest compress`.")],
    questions: Annotated[list[str], typer.Argument(help="One question, or several: each of the document alone.")],
    model: Annotated[str, typer.Option(help="Where the model is, if not where the file says.")] = "",
    max_new_tokens: MaxNewTokens = 128,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Questions to a document that was read and evicted before; answers go to standard output."""
    from kvest.cli.compress import ask as command

    command(file, questions, model, max_new_tokens, device, json)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or an embedded model: smollm2, gemma3-270m.")],
    texts: Annotated[
        list[Path] | None, typer.Option(help="Measured on the beginning of this text file. May be repeated.")
    ] = None,
    method: Annotated[
        Method, typer.Option(help="damage: a pass for each head and budget; gradient: a pass for each text.")
    ] = (Method.damage),
    tokens: Annotated[int, typer.Option(min=2, help="How much of each text is read.")] = 512,
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The table to write. Default: where kvest looks for it.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure what the budget of each head is worth: for policies with one_threshold(importance=...).

    Without --texts: six State of the Union speeches. The tables of the embedded models come with kvest.
    """
    from kvest.cli.calibrate import calibrate as command

    command(model, texts or [], method.value, tokens, seed, dtype.value, device, output, json)


@app.command(name="ls")
def ls(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """The names that a policy can be made of, each with the first line of what it does."""
    from kvest.cli.ls import ls as command

    command(kind.value)


@app.command()
def explain(
    policy: Annotated[str, typer.Argument(help="A policy, with or without its budget, or the name of one.")],
    json: Json = None,
) -> None:
    """What each part of a policy does: its formula, its source, and what it needs."""
    from kvest.cli.explain import explain as command

    command(policy, json)
