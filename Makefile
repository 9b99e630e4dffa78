# `make demo` and `make test` do all their own set-up in .venv; nothing else is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test fast bench-smoke picture check

# The torch of constraints.txt is named first and alone: it is the one that decides CPU or CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# A real document, lines deleted, a question answered on a 5 % budget.
demo: $(VENV)/ready
	cd sessions/quickstart && PATH="$(CURDIR)/$(BIN):$$PATH" sh -e -v ./script.txt

# Two processes with a thread each; the model is got first, so that they do not both get it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: check
	$(BIN)/kvedit models pull smollm2-135m
	$(PYTEST)

# Without the tests that need the default model, or a minute.
fast: check
	$(PYTEST) -m "not model and not slow"

# A small cut of every bench on the default model; about three minutes.
bench-smoke: $(VENV)/ready
	$(BIN)/python benchmarks/smoke.py

# Records a session of the default model, and draws docs/session.svg from it.
picture: $(VENV)/ready
	$(BIN)/python docs/picture.py

check: $(VENV)/ready
	$(BIN)/ruff format --check kvedit tests benchmarks docs
	$(BIN)/ruff check kvedit tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports
