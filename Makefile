# Two commands set everything up by themselves: `make train` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
# Some versions of torch want a setuptools of their own.
OTHER_TORCH := $(filter-out $(PINNED),$(TORCH))
VENV := .venv$(addprefix -torch-,$(OTHER_TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Hundreds of processes of the tests import the same modules: whoever keeps no bytecode pays for that in minutes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-slurm test-processors test-gpu check docs release-check format clean

train: $(VENV)/installed ## train a network on every core of this machine
	$(BIN)/tutti train

test: $(VENV)/installed-dev ## run the whole test suite; TORCH=2.15.0: with that torch, in an environment of its own
	@failed=0; set -x; \
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder -m 'not serial' || failed=1; \
	$(BIN)/python -m pytest -m serial $$(grep -rl --include='*.py' 'mark\.serial' tests) || failed=1; \
	exit $$failed

# A float32 sum is rounded otherwise by each processor: a test that holds on one of them alone holds by chance.
TESTS ?= tests/allreduce tests/data/test_parts.py tests/model_parallel tests/optim tests/own_loop tests/parameter_server \
	tests/strategies tests/test_replica.py tests/torch_backend tests/training
test-processors: $(VENV)/installed-dev ## run the tests of numbers with the kernels of older processors; TESTS=some of them
	for isa in default:SSE41 avx2:AVX2; do ATEN_CPU_CAPABILITY=$${isa%:*} ONEDNN_MAX_CPU_ISA=$${isa#*:} \
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile -m 'not mpi and not serial' $(TESTS) || exit; done

# A real Slurm on this machine, in network namespaces. PMIx is a plugin that looks for a file of libpmix-dev.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge libpmix-dev
test-slurm: $(VENV)/installed-dev ## train under a real Slurm; as root on Debian it installs that first
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get install -y --no-install-recommends $(SLURM_PACKAGES) || echo "no Slurm"; fi
	$(BIN)/python -m pytest tests/cluster/test_slurm.py

# Where $(PYTHON) has a torch that finds a GPU, with that: a GPU's machine may reach no package index. Warnings of
# versions that we have not chosen are no errors.
test-gpu: ## run what needs an NVIDIA GPU, then measure it: benchmarks/RESULTS-gpu.md
	@if $(PYTHON) -c 'import pytest, torch; assert torch.cuda.is_available()' 2>/dev/null; \
	then python=$(PYTHON); else $(MAKE) $(VENV)/installed-dev && python=$(BIN)/python || exit; fi; \
	export PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}; \
	$$python -m pytest tests/gpu -W default --durations 0; failed=$$?; \
	$$python benchmarks/gpu.py && exit $$failed

check: $(VENV)/installed-dev ## format, lint, types and boundaries
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/installed-dev ## build the documentation site in build/site; a link that leads nowhere is an error
	$(BIN)/python -m website build/site

WHOLE ?=
release-check: $(VENV)/installed-dev ## build sdist and wheel, check both, and train with the wheel; WHOLE=1: with all that it needs installed anew
	$(BIN)/python -m tests.release build/release $(WHOLE:%=--whole)

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-torch-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	sed -e 's/^torch==.*/torch==$(TORCH)/' $(OTHER_TORCH:%=-e '/^setuptools==/d') $< > $@

$(VENV)/installed: pyproject.toml $(VENV)/constraints.txt
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/constraints.txt
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable '.[mpi,tensorboard,mlflow,plots,browser,tune,test,docs,dev,release]'
	touch $@ $(VENV)/installed
