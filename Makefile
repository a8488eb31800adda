# What a person runs and what CI runs are the same commands. Needs Python 3.11 or newer, and make.

PYTHON ?= python3
BIN := .venv/bin
DEMO ?= demo
# On two idle cores two threads are twice as fast; beside any other load one thread is faster.
THREADS ?= 2

.PHONY: help demo test live bench shipped format lint types tests wheel clean

help:
	@echo "make demo    run the sample on the embedded model, from nothing"
	@echo "make test    format check, lint, types, tests, wheel check"
	@echo "make live    tests on the real embedded model (fetches 98 MB)"
	@echo "make bench   speed beside other engines"
	@echo "make shipped fit the learned parts of the package again"

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

# The stamps name what is installed; a change of the project's metadata installs again.
.venv/.demo: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[local]'
	@touch $@

.venv/.dev: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[local,dev]'
	@touch $@ .venv/.demo

demo: .venv/.demo
	$(BIN)/splice models pull 0.5b
	@test -e $(DEMO) || $(BIN)/splice init $(DEMO)
	$(BIN)/splice repair $(DEMO)/workflow.toml --queries $(DEMO)/queries.jsonl --threads $(THREADS)

test: format lint types tests wheel

format: .venv/.dev
	$(BIN)/ruff format --check .

lint: .venv/.dev
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

tests: .venv/.dev
	$(BIN)/python -m pytest -q

wheel: .venv/.dev
	$(BIN)/python tests/check_wheel.py

live: .venv/.dev
	$(BIN)/splice models pull 135m
	$(BIN)/python -m pytest -q -m live

bench: .venv/.dev
	$(BIN)/python -m pip install --quiet -r benchmarks/requirements.txt
	$(BIN)/python -m benchmarks --markdown

shipped: .venv/.dev
	$(BIN)/splice selector fit selector_training/pools/multihop selector_training/pools/plancraft --out splice/shipped

clean:
	rm -rf .venv build dist $(DEMO) .mypy_cache .ruff_cache .pytest_cache .hypothesis
