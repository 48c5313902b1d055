"""Imports point one way: `types < stages < policy < hf < eval < report, cli`; importing kvest changes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging import version

import kvest

ROOT = Path(kvest.__file__).parent
LAYERS = [
    {"types", "random", "budget", "rotary", "neighbours"},
    {"observe", "propose", "allocate", "sample", "correct", "stand_in", "retain", "attend", "certify"},
    {"grammar", "named"},
    {"policy"},
    {"hf", "integrations"},
    {"eval"},
    {"report", "cli", "__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def home(path: Path) -> str:
    """The layer's part that a file belongs to: its first folder, or its own name."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.Module, path: Path) -> list[str]:
    """Modules that the file needs when it runs, wherever it imports them (not those that only type checkers see)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_the_oldest_supported_release_is_one_that_is_tested():
    """Fault 21: the lower bound of the package is the first file of pins, on which the model tests run."""
    root = Path(__file__).parents[1]
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [name.removeprefix("transformers>=") for name in dependencies if name.startswith("transformers")]
    releases = sorted((path.stem for path in (root / "constraints").glob("*.txt")), key=version.parse)
    assert bounds == releases[:1]
    assert "make test-oldest" in (root / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    mine = home(path)
    assert mine in RANK, f"give {mine} a place in LAYERS"
    for name in imported(ast.parse(path.read_text()), path):
        package, *rest = name.split(".")
        if package != "kvest" or not rest:
            continue
        if rest[0] not in RANK:  # a name that the package itself offers
            assert rest[0] in kvest.__all__, name
            rest = kvest._HOME.get(rest[0], "kvest.types").split(".")[1:]
        assert RANK[rest[0]] <= RANK[mine], f"{mine} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_stages_know_tensors_only(path):
    """No model and no transformers below hf: another engine can use them."""
    names = {name.split(".")[0] for name in imported(ast.parse(path.read_text()), path)}
    if RANK[home(path)] < RANK["hf"]:
        known = {"__future__", "kvest", "torch", "jaxtyping", "safetensors", "math", "re", *sys.stdlib_module_names}
        assert names <= known


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_kvest_imports_neither_torch_nor_transformers():
    said = run(
        "import sys, kvest; print(kvest.__version__, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert said == f"{kvest.__version__} []\n"


def test_the_stages_run_without_transformers():
    code = (
        "import sys, kvest; kvest.Policy; kvest.attention; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert run(code) == "True False\n"


def test_importing_kvest_registers_nothing_with_transformers():
    """Fault 20: registries of attention and mask functions, and the attention of a model class, are as they were."""
    code = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
import transformers.masking_utils as functions

def state():
    tables = dict(attention.items()), dict(masks.items())
    return *tables, dict(vars(LlamaAttention)), dict(vars(LlamaModel)), dict(vars(functions))

before = state()
import kvest, kvest.hf
kvest.EvictionCache, kvest.Policy
print(state() == before, len(before[0]) > 1)
"""
    assert run(code) == "True True\n"


def test_every_name_that_kvest_offers_is_there():
    assert all(getattr(kvest, name) is not None for name in kvest.__all__)
    assert dir(kvest) == sorted(kvest.__all__)
    with pytest.raises(AttributeError, match="no attribute 'EvictonCache'"):
        kvest.EvictonCache  # noqa: B018
