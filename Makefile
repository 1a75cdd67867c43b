# Two commands do everything on a fresh machine: `make demo` and `make test`. See README.md.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard ext/*.pyx fpmsdk/_ext/*.pxd) setup.py pyproject.toml

.PHONY: demo test lint bench clean

$(VENV)/.ready: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test,lint]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/fpmsdk demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest tests fpmsdk -m 'not slow'

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_cimport_order.py

bench: $(VENV)/.ready
	$(BIN)/python -m pytest benchmarks --benchmark-only

clean:
	rm -rf build dist *.egg-info fpmsdk/_ext/*.so $(VENV)
