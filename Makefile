# `make demo` and `make test` set up .venv themselves; nothing else is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test fast bench-smoke picture check

# torch is installed first and separately, because this step decides between CPU and CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Loads a document, deletes lines, and answers a question on a 5 % budget.
demo: $(VENV)/ready
	cd sessions/quickstart && PATH="$(CURDIR)/$(BIN):$$PATH" sh -e -v ./script.txt

# Two processes with one thread each. The model is fetched first, so that they do not both fetch it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: check
	$(BIN)/kvedit models pull smollm2-135m
	$(PYTEST)

# Skips tests that need the default model or take long.
fast: check
	$(PYTEST) -m "not model and not slow"

# Runs a small version of every bench on the default model; about three minutes.
bench-smoke: $(VENV)/ready
	$(BIN)/python benchmarks/smoke.py

# Records a session with the default model and draws docs/session.svg from it.
picture: $(VENV)/ready
	$(BIN)/python docs/picture.py

check: $(VENV)/ready
	$(BIN)/ruff format --check kvedit tests benchmarks docs
	$(BIN)/ruff check kvedit tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports
