# Two commands do all the set-up: `make demo` and `make test`. Both build .venv on first use from constraints.txt.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2
# Oldest and newest supported Triton, beside the venv's own: the kernels are compiled offline under both.
TRITONS := 3.6.0 3.9.0

.PHONY: demo test mutants lint

demo: $(VENV)/.ready
	$(PY) examples/demo.py

test: $(VENV)/.ready $(TRITONS:%=$(VENV)/triton-%/.ready) lint
	$(PY) -m pytest -n $(JOBS)
	TRITON_INTERPRET=1 $(PY) -m pytest -n $(JOBS) tests/kernels

mutants: $(VENV)/.ready
	$(PY) -m tests.mutants

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/triton-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$*
	touch $@
