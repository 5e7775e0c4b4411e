# make quickstart   everything from nothing: environment, model, data, and the main job
# make test         the tests, in two processes (ARGS="-k lora" passes arguments on, JOBS=0 stays in one process)
# make lint         style and types
# make docs         the guides and the API reference, in site/
#
# Needs Python 3.10+, make and git, nothing else. All lives in .venv (VENV=...) and runs/; both can be deleted.
#
# TORCH=cpu installs torch==2.13.0 before the package, so that a package index or wheel folder set up for CPU
# builds supplies it. It is the default on machines without an NVIDIA driver. TORCH=newest leaves the choice to
# pip: on Linux the public index then gives a CUDA build of several GB, which is what a machine with GPUs wants.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),newest,cpu)
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test lint docs install clean

quickstart: $(STAMP)
	$(BIN)/lightning-shard finetune --config recipes/quickstart.yaml $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

install: $(STAMP)

# Made again when the dependencies change.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version) is too old: \
	lightning-shard needs Python 3.10 or newer. Name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(filter cpu,$(TORCH)),$(BIN)/python -m pip install --quiet torch==2.13.0)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) site
