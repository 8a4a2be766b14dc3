# The commands of a fresh machine: `make demo`, `make chat` and `make test`. Each makes .venv first; none needs a GPU or a hub.
PYTHON ?= python3
BIN := .venv/bin

# Tests of what depends on the instructions of the CPU. (tests/kernels/test_targets.py compiles for others by itself.)
BY_CPU := tests/kernels/native tests/kernels/quantized tests/models/quantization tests/e2e/test_against_transformers.py \
	tests/e2e/test_quantized_folders.py tests/e2e/test_failures.py

.PHONY: setup dev demo chat test test-avx2 lint docs bench clean

setup: .venv/.installed
dev: .venv/.dev

# The stamps are remade when the dependencies change; the sources themselves are installed in place.
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

.venv/.dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/nanoengine demo

chat: setup
	$(BIN)/nanoengine run smollm2

test: dev
	$(BIN)/python -m pytest -n auto --dist worksteal

# Once more as a CPU with AVX2 alone computes, where this one has more.
test-avx2: dev
	if grep -qw avx512vl /proc/cpuinfo; then NANOENGINE_CPU=x86-64-v3 $(BIN)/python -m pytest -n auto --dist worksteal $(BY_CPU); fi

lint: dev
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

bench: dev
	$(BIN)/python bench.py workloads

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
