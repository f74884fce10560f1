# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
LOCK := $(firstword $(wildcard requirements-dev-$(VERSION).lock) requirements-dev.lock)

# How long OpenMP's threads spin at a barrier: its default is ten times slower on a busy machine.
export GOMP_SPINCOUNT ?= 10000

.PHONY: setup demo test test-all lint bench sweep clean

setup: $(VENV)/ready

$(VENV)/ready: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/python -m trtllm_specprefill.evaluation demo

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m perf.bench --out perf/results

sweep: setup
	$(BIN)/python -m perf.sweep

clean:
	rm -rf $(VENV) build dist *.egg-info
