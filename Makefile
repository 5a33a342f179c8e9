# SPDX-License-Identifier: Apache-2.0
# `make demo`, `make test` and `make lint` each do all the set-up they need: a Linux machine with Python >= 3.11 and
# make is enough. Run it again after a change of pyproject.toml and only the changed parts are installed.
#
#   make demo PYTHON=python3.12          another interpreter
#   make test TORCH=torch==2.11.0        another torch (2.11 to 2.13)
#   make test PYTEST_ARGS="-m 'not slow and not long' -x"
#   make demo PIP_FLAGS="--index-url ..."   e.g. the index with torch's small CPU wheels
#   make demo ARGS="--problems 8"        options of `dllm-compile demo`

PYTHON    ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
               $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV      ?= .venv
TORCH     ?= torch==2.13.0
# The release that this torch was built against; an unpinned install takes a later one, which torch does not know.
TRITON    ?= $(if $(findstring 2.11,$(TORCH)),triton==3.6.0,$(if $(findstring 2.12,$(TORCH)),triton==3.7.0,triton==3.7.1))
PIP_FLAGS ?=
PYTEST_ARGS ?=
# Tests run in this many processes; 1 for one after another in one process (a debugger, or a card they would share).
WORKERS   ?= 2
ARGS      ?=

RUN  := $(VENV)/bin
PIP  := $(RUN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
# torch and triton are named in every later call too, so that no other requirement can move them.
KEEP  = "$(TORCH)"
TORCH_STAMP := $(VENV)/.torch-$(subst =,-,$(TORCH))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format wheel clean

help: ## say what can be made
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed ## set up, then run the main job on the bundled model
	@$(RUN)/python -m dllm_compile.cli demo $(ARGS)

test: $(VENV)/.test ## set up with the test extras, then run the whole suite
	@$(RUN)/python -m pytest $(if $(filter-out 0 1,$(WORKERS)),-n $(WORKERS) --dist worksteal) $(PYTEST_ARGS)

lint: $(VENV)/.lint ## ruff (rules and format) and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(VENV)/.lint ## let ruff format and mend what it can
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

wheel: $(VENV)/.test ## build the wheel into dist/
	$(RUN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found: install one, or name it with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments: install its venv package (Debian, Ubuntu: python3-venv)"; exit 1; }
	@echo "[set-up] $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# By itself and first: the index's own choice of torch may be one that is not supported yet.
$(TORCH_STAMP): $(VENV)/.python
	@echo "[set-up] $(TORCH)"
	@rm -f $(VENV)/.torch-*
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(TORCH_STAMP) pyproject.toml
	@echo "[set-up] dllm-compile"
	@$(PIP) $(KEEP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "[set-up] test extras"
	@$(PIP) $(KEEP) -e ".[test,fp8]"
	@$(RUN)/python -c 'import triton' 2>/dev/null || { echo "[set-up] $(TRITON)"; $(PIP) --no-deps "$(TRITON)"; }
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@echo "[set-up] linters"
	@$(PIP) $(KEEP) -e ".[lint]"
	@touch $@
