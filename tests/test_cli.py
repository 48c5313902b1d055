"""The command line as a person meets it: exit codes, one clear message, files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvest.cli import main
from kvest.grammar import TABLES
from kvest.named import DEMO, NAMED
from kvest.policy import Policy

KVEST = Path(sys.executable).with_name("kvest")


@dataclass(frozen=True)
class Out:
    returncode: int
    stdout: str
    stderr: str


Kvest = Callable[..., Out]


@pytest.fixture
def kvest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvest:
    """The command in this process: the real entry point, without the seconds that importing torch takes."""

    def run(*arguments: str, stdin: str = "") -> Out:
        monkeypatch.setattr(sys, "argv", ["kvest", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Out(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def tiny_folder(tiny_model, tmp_path: Path) -> Path:
    """A model folder as a user has one: a tiny random llama with a byte-level tokenizer without a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tiny_model()
    model.resize_token_embeddings(len(alphabet) + 2)
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def test_help_imports_neither_torch_nor_transformers():
    """--help answers in well under a second because nothing heavy is loaded; importing torch alone takes longer."""
    code = (
        "import sys; sys.argv = ['kvest', '--help']\nfrom kvest.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "compare" in out
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("kind", ["proposal", "allocation", "design", "correction", "stand-in"])
def test_ls_names_every_part(kvest: Kvest, kind: str):
    out = kvest("ls", f"{kind}s")
    assert out.returncode == 0
    first = {line.split()[0] for line in out.stdout.splitlines() if line and not line.startswith(" ")}
    assert set(TABLES[kind]) <= first


def test_named_policies_are_policies():
    for sentence in (*NAMED.values(), *DEMO):
        policy = Policy.parse(f"{sentence}@0.25")
        assert str(policy) == f"{sentence}@0.25"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--policy", "snapk/top_k/none@0.25"], "Did you mean 'snapkv'?"),
        (["generate", "--policy", "snapkv/top_k/inclusion@0.25", "--prompt-file", "x"], "would be 0 everywhere"),
        (["generate", "--policy", "snapkv/top_k/none@1.5"], "keep must be in (0, 1], not 1.5"),
        (["generate", "--policy", "snapkv/top_k/none@10"], "raise it to at least 20"),
        (["generate"], "give --prompt-file"),
        (["generate", "--prompt-file", "/no/such/file"], "no file '/no/such/file'"),
        (["compare", "--policy", "snapkv/top_k/none@0.5, every=8"], "every=8"),
        (["compare", "--prompt-file", __file__], "--question"),
        (["compare", "--policy", "snapkv/top_k/none@0.5", "--model", "/no/such/folder"], "'/no/such/folder'"),
        (["compare", "--policy", "snapkv/top_k/none@0.5", "--device", "cuda:77"], "cuda:77"),
        (["compare", "--dtype", "float8"], "float8"),
        (["ls", "proposal"], "proposal"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(kvest: Kvest, arguments: list[str], says: str):
    out = kvest(*arguments)
    assert out.returncode == 2
    assert says in " ".join(out.stderr.split())
    assert "Traceback" not in out.stderr
    assert out.stdout == ""


def test_an_empty_document_is_refused(kvest: Kvest, tmp_path: Path):
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    out = kvest("generate", "--prompt-file", str(empty), "--question", "What?")
    assert out.returncode == 2
    assert "is empty" in out.stderr


def test_generate_on_a_folder_writes_answer_report_and_json(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    record = tmp_path / "out.json"
    options = ["--question", "Why?", "--max-new-tokens", "5", "--policy", "keydiff/systematic/inclusion@0.25"]
    out = kvest(
        "generate",
        "--model",
        str(tiny_folder),
        "--prompt-file",
        "-",
        *options,
        "--json",
        str(record),
        stdin="abc " * 100,
    )
    assert out.returncode == 0, out.stderr
    assert "keydiff/systematic/inclusion@0.25" in out.stderr
    written = json.loads(record.read_text())
    report = written["report"]
    assert written["answer"].strip() == out.stdout.strip()
    assert report["kept_bytes"] < report["full_bytes"]
    assert report["evictions"] == [1]
    assert written["conditions"]["transformers"]


def test_documents_are_repeated_where_the_policy_asks_for_it(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    """generate, compare and compress, with the tokenizer that they have: all three keep the same entries."""
    document, record, cache = tmp_path / "document.txt", tmp_path / "out.json", tmp_path / "document.kvest"
    document.write_text("some words and others. " * 12)
    common = ["--model", str(tiny_folder), "--policy", "kvzip@0.5", "--json", str(record)]
    asked = ["--prompt-file", str(document), "--question", "Why?", "--max-new-tokens", "3"]
    out = kvest("generate", *common, *asked)
    assert out.returncode == 0, out.stderr
    written = json.loads(record.read_text())
    assert written["report"]["policy"] == "kvzip+one_threshold(raw=True)/top_k/none@0.5"
    assert written["report"]["evictions"] == [1]
    out = kvest("compare", *common, *asked)
    assert out.returncode == 0, out.stderr
    row = json.loads(record.read_text())["rows"][1]
    kept = [len(head) for layer in written["report"]["positions"] for head in layer[0]]
    asked_and_said = written["report"]["seen"][0] - json.loads(record.read_text())["document_tokens"]
    assert (row["kept_min"], row["kept_max"]) == (min(kept) - asked_and_said, max(kept) - asked_and_said)
    assert row["answer"] == written["answer"]
    out = kvest("compress", str(document), "-o", str(cache), *common)
    assert out.returncode == 0, out.stderr
    out = kvest("ask", str(cache), "Why?", "--max-new-tokens", "3")
    assert out.stdout.strip() == written["answer"]


def test_a_prompt_beyond_the_context_is_refused(kvest: Kvest, tiny_folder: Path):
    options = ["--model", str(tiny_folder), "--prompt-file", "-", "--question", "Why?"]
    out = kvest("generate", *options, stdin="abc " * 2000)
    assert out.returncode == 2
    assert "beyond the model's context of 4096" in out.stderr


def test_compare_on_a_folder_has_the_full_cache_first_and_keeps_what_the_policy_says(
    kvest: Kvest, tiny_folder: Path, tmp_path: Path
):
    record = tmp_path / "out.json"
    document = tmp_path / "document.txt"
    document.write_text("some words and others. " * 30)
    options = ["--prompt-file", str(document), "--question", "Why?", "--max-new-tokens", "3", "--json", str(record)]
    policies = ["--policy", "keydiff/top_k/none@0.5", "--policy", "uniform/poisson/inclusion@60"]
    out = kvest("compare", "--model", str(tiny_folder), *options, *policies)
    assert out.returncode == 0, out.stderr
    rows = json.loads(record.read_text())["rows"]
    tokens = json.loads(record.read_text())["document_tokens"]
    assert [row["policy"] for row in rows] == ["full cache", "keydiff/top_k/none@0.5", "uniform/poisson/inclusion@60"]
    assert rows[0]["kl_nats"] == 0
    assert rows[0]["kept_mean"] == tokens
    assert rows[1]["kept_min"] == rows[1]["kept_max"] == tokens // 2
    assert rows[2]["kept_min"] < rows[2]["kept_max"]
    assert all(row["kl_nats"] > 0 for row in rows[1:])
    assert "full cache" in out.stdout


def test_compare_leaves_out_what_needs_a_table_that_the_model_lacks(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    record = tmp_path / "out.json"
    options = ["--prompt-file", "-", "--question", "Why?", "--max-new-tokens", "2", "--json", str(record)]
    out = kvest("compare", "--model", str(tiny_folder), *options, stdin="some words and others. " * 30)
    assert out.returncode == 0, out.stderr
    damage = [sentence for sentence in DEMO if "importance" in sentence]
    assert len(damage) == 1
    assert f"left out: {damage[0]}@0.5" in out.stderr
    assert "kvest calibrate" in out.stderr
    shown = [row["policy"] for row in json.loads(record.read_text())["rows"]]
    assert shown == ["full cache", *(f"{s}@{keep}" for keep in (0.5, 0.25) for s in DEMO if s not in damage)]


def test_json_that_cannot_be_written_leaves_nothing(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    options = ["--model", str(tiny_folder), "--prompt-file", "-", "--question", "Why?", "--max-new-tokens", "2"]
    out = kvest("generate", *options, "--json", str(tmp_path / "no" / "where.json"), stdin="abc " * 50)
    assert out.returncode == 2
    assert "cannot write" in out.stderr


def test_the_installed_command_reports_bad_input():
    out = subprocess.run(
        [KVEST, "generate", "--policy", "h2p/top_k/none@1"], capture_output=True, text=True, check=False
    )
    assert out.returncode == 2
    assert "Did you mean 'h2o'?" in out.stderr


def compressed(kvest: Kvest, folder: Path, tmp_path: Path) -> Path:
    file = tmp_path / "document.kvest"
    document = tmp_path / "document.txt"
    document.write_text("some words and others. " * 30)
    options = ["--model", str(folder), "--policy", "keydiff/systematic/inclusion@0.25", "-o", str(file)]
    out = kvest("compress", str(document), *options)
    assert out.returncode == 0, out.stderr
    assert out.stdout == ""
    assert "keydiff/systematic/inclusion@0.25" in out.stderr
    assert "written" in out.stderr
    return file


def test_one_compression_serves_many_questions(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    """Fault 15: each answer is the one that `kvest generate` gives, in any order and as often as asked."""
    file = compressed(kvest, tiny_folder, tmp_path)
    before = file.read_bytes()
    record = tmp_path / "answers.json"
    options = ["--max-new-tokens", "6"]
    out = kvest("ask", str(file), "Why?", "And what else?", "Why?", *options, "--json", str(record))
    assert out.returncode == 0, out.stderr
    answers = [each["answer"] for each in json.loads(record.read_text())["answers"]]
    same = ["--model", str(tiny_folder), "--prompt-file", str(tmp_path / "document.txt"), *options]
    same += ["--policy", "keydiff/systematic/inclusion@0.25"]
    for question, said in zip(("Why?", "And what else?", "Why?"), answers, strict=True):
        assert kvest("generate", "--question", question, *same).stdout.strip() == said
    assert answers[0] != answers[1]
    assert file.read_bytes() == before


def test_ask_says_what_is_wrong(kvest: Kvest, tiny_folder: Path, tiny_model, tmp_path: Path):
    file = compressed(kvest, tiny_folder, tmp_path)
    cut = tmp_path / "cut.kvest"
    cut.write_bytes(file.read_bytes()[:-20])
    model = tiny_model()
    import_cache(model, tmp_path / "bare.kvest")
    cases = [
        ([str(tmp_path / "no.kvest"), "Why?"], "no such file"),
        ([str(cut), "Why?"], "cut off"),
        ([str(tmp_path / "document.txt"), "Why?"], "no safetensors file"),
        ([str(tmp_path / "bare.kvest"), "Why?"], "not written by kvest compress"),
        ([str(file), "  "], "a question is empty"),
        ([str(file), "Why? " * 900], "ask a shorter question"),
        ([str(file), "Why?", "--model", "/no/such/folder"], "'/no/such/folder'"),
        ([str(file)], "Missing argument"),
    ]
    for arguments, says in cases:
        out = kvest("ask", *arguments)
        assert out.returncode == 2, arguments
        assert says in " ".join(out.stderr.split()), out.stderr
        assert out.stdout == ""


def import_cache(model, path: Path) -> None:
    """A cache that was saved from Python, without the notes of the command."""
    import kvest as library

    library.EvictionCache(model, "keydiff/top_k/none@0.5").save(path)


def test_compress_says_what_is_wrong(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    document = tmp_path / "document.txt"
    document.write_text("some words and others. " * 30)
    model = ["--model", str(tiny_folder)]
    cases = [
        (["/no/such/file", "-o", str(tmp_path / "a")], "no file '/no/such/file'"),
        ([str(document), "-o", str(tmp_path / "no" / "a")], "cannot write"),
        ([str(document), "-o", str(tmp_path)], "it is a folder"),
        ([str(document), "-o", str(document)], "is named twice"),
        ([str(document), "-o", str(tmp_path / "a"), "--json", str(tmp_path / "a")], "is named twice"),
        ([str(document)], "Missing option"),
        ([str(document), "-o", str(tmp_path / "a"), "--policy", "snapk/top_k/none@0.5"], "Did you mean 'snapkv'?"),
    ]
    for arguments, says in cases:
        out = kvest("compress", *arguments, *model)
        assert out.returncode == 2, arguments
        assert says in " ".join(out.stderr.split()), out.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["document.txt", "tiny"]


def test_explain_says_what_each_part_does_and_needs(kvest, tmp_path):
    record = tmp_path / "parts.json"
    out = kvest("explain", "kvest@0.1, every=64", "--json", str(record))
    assert out.returncode == 0
    said = " ".join(out.stdout.split())
    for words in ("1 - cos(k_i, m)", "arXiv:2504.15364", "every query of the prompt", "log w_i = -tau log pi_i"):
        assert words in said
    parts = json.loads(record.read_text())["parts"]
    assert [part["stage"] for part in parts[:3]] == ["propose", "proposal", "by"]
    assert parts[2]["part"] == "keydiff"
    assert parts[2]["unlike"] == "shifted by 1, to be non-negative."
    assert "evicted again whenever 64 entries have come on top" in json.loads(record.read_text())["budget"]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_policy_can_be_explained(kvest, name):
    """Without a budget as well; each part has a formula."""
    out = kvest("explain", name)
    assert out.returncode == 0
    assert f"{NAMED[name]}@0.25" in " ".join(out.stdout.split())


def test_explain_points_at_what_it_cannot_read(kvest):
    out = kvest("explain", "snapk/top_k/none")
    assert out.returncode == 2
    assert "Did you mean 'snapkv'?" in out.stderr


def test_calibrate_writes_a_table_that_policies_then_find(
    kvest: Kvest, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A policy that needs it is refused before, with the command that makes it, and works afterwards."""
    monkeypatch.setenv("KVEST_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("some words and others. " * 20)
    ask = ["--model", str(tiny_folder), "--prompt-file", str(text), "--question", "Why?", "--max-new-tokens", "2"]
    policy = "h2o+one_threshold(importance=calibrated)/systematic/inclusion@0.5"
    before = kvest("generate", *ask, "--policy", policy)
    assert before.returncode == 2
    assert f"kvest calibrate {tiny_folder} --method gradient" in " ".join(before.stderr.split())
    record = tmp_path / "record.json"
    options = ["--texts", str(text), "--method", "gradient", "--tokens", "50", "--json", str(record)]
    out = kvest("calibrate", str(tiny_folder), *options)
    assert out.returncode == 0, out.stderr
    assert "3 layers of 2 KV heads" in out.stderr
    [table] = (tmp_path / "cache" / "calibration").iterdir()
    said = json.loads(record.read_text())
    assert (said["method"], said["file"], said["texts"][0][0::2]) == ("gradient", str(table), [str(text), 50])
    assert [len(layer) for layer in said["importance"]] == [2, 2, 2]
    assert said["conditions"]["dtype"] == "float32"
    assert kvest("generate", *ask, "--policy", policy).returncode == 0


def test_calibrate_says_what_is_wrong(kvest: Kvest, tiny_folder: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    cases = [
        (["--texts", "/no/such/file"], "give --texts a text file"),
        (["--texts", str(text)], f"'{text}' has 10 tokens, and 544 are read"),
        (["--texts", str(text), "-o", str(text)], "is named twice"),
        (["--texts", str(text), "-o", str(tmp_path)], "it is a folder"),
        (["--method", "curvature"], "'curvature' is not one of"),
    ]
    for arguments, says in cases:
        out = kvest("calibrate", str(tiny_folder), *arguments)
        assert out.returncode == 2, arguments
        assert says in " ".join(out.stderr.split()), out.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tiny"]
