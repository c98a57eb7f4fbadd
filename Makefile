# Two commands set everything up by themselves: `make train` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test test-gpu check format clean

train: $(VENV)/installed ## train a network on every core of this machine
	$(BIN)/tutti train

test: $(VENV)/installed-dev ## run the whole test suite
	$(BIN)/python -m pytest

test-gpu: $(VENV)/installed-dev ## run what needs an NVIDIA GPU, then measure it: benchmarks/RESULTS-gpu.md
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py

check: $(VENV)/installed-dev ## format, lint, types and boundaries
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[mpi,tensorboard,mlflow,plots,browser,bench,test,dev]'
	touch $@ $(VENV)/installed
