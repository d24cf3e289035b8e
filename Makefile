# make demo    a first product: on the GPUs of this machine, or on CPU workers
# make test    lint, types and the tests that a change needs: some 6 minutes on two cores
# make test PYTEST_ARGS="tests/test_io.py -k zarr"     these tests alone, without lint
# make test-all      the same and all other tests that this machine can run: what CI does
# make faults        plants faults, one after another, and sees that tests find them: long
# make lint    lint and types only
# make wheel-check   build, install the wheel elsewhere, read the kernels from there
# make docs    the documentation site, in build/site/docs/index.html; its notebooks run
# make docs-check    every page of it in a headless browser (Debian's package chromium)
# make clean   remove what the commands above made
#
# Each sets up what it needs in .venv. To use other interpreters or places:
#   make test BASE_PYTHON=python3.13     the interpreter that .venv is made with
#   make test VENV=/somewhere/else       where the environment goes
#   make test PYTHON=/usr/bin/python3    an interpreter that has everything: nothing is installed
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

BASE_PYTHON ?= python3
VENV ?= .venv

ifdef PYTHON
RUN := $(PYTHON)
DEV :=
DEMO :=
else
RUN := $(VENV)/bin/python
DEV := $(VENV)/.installed-dev
DEMO := $(VENV)/.installed-demo
endif
# The checkout comes first also where nothing is installed, and in worker processes.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Hundreds of processes import the same modules: what Python compiles of them is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all faults lint wheel-check docs docs-check clean
help:
	@sed -n 's/^# //p' Makefile

demo: $(DEMO)
	$(RUN) -m multimm demo

# Tests run in a process per core and one more, for many wait for workers to start; each has one
# thread for BLAS. Those that others beside them would disturb have their turn afterwards, and only
# their files are read again. Where there is no pytest-xdist, all run in one process. What fails runs
# once more, with nothing beside it: a fault fails again, and what only a busy machine brought about
# does not. Both runs are shown.
ALONE := alone or gpu or multigpu
ALONE_FILES = $(shell grep -rlE 'mark\.(alone|gpu|multigpu)\b' tests --include='test_*.py')
# Files in their order, each as a whole: what its tests share is made once.
BESIDE := --numprocesses=$(shell expr $$(nproc) + 1) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
AGAIN = $(RUN) -m pytest -v --maxfail=1 --last-failed --last-failed-no-failures=none

# CI has MEANWHILE made beside the tests that run alone, of what these leave of the cores: targets
# that wait a lot, for archives, for workers that start, for pages.

# What `make test` leaves out: CONTRIBUTING.md says what that is.
test: BUT := and not slow

ifeq ($(strip $(PYTEST_ARGS)),)
test test-all: lint
	@if ! $(RUN) -c 'import xdist' 2>/dev/null; then set -x; \
	    exec $(RUN) -m pytest $(if $(BUT),-m 'not slow'); fi; \
	failed=0; set -x; \
	OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest $(BESIDE) -m 'not ($(ALONE)) $(BUT)' \
	    || $(AGAIN) || failed=1; \
	$(if $(MEANWHILE),mkdir -p build; nice -n 19 make -j2 -O $(MEANWHILE) >build/log 2>&1 & meanwhile=$$!;) \
	again=; $(RUN) -m pytest -m '($(ALONE)) $(BUT)' $(ALONE_FILES) || again=1; \
	$(if $(MEANWHILE),wait $$meanwhile || failed=1; cat build/log;) \
	[ -z "$$again" ] || $(AGAIN) || failed=1; \
	exit $$failed
else
# What was asked for and nothing else, in one process.
test test-all: $(DEV)
	$(RUN) -m pytest $(PYTEST_ARGS)
endif

faults: $(DEV)
	$(RUN) tests/planted_faults.py

lint: $(DEV)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m codespell_lib

wheel-check: $(DEV)
	$(RUN) .ci/wheel_check.py

# Warnings are errors: a link that leads nowhere, or a notebook that fails, ends the build.
docs: $(DEV)
	PATH="$(abspath $(dir $(RUN))):$$PATH" MULTIMM_CACHE_DIR=$(CURDIR)/build/cache \
	$(RUN) -m sphinx -b html -c docs -d build/doctrees -E -n -W -q -j auto . build/site

# With the benchmarks' report: it has to fit on a phone, too.
docs-check: docs
	$(RUN) -m multimm report --output build/site/report
	$(RUN) .ci/docs_check.py build/site

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -not -path './.git/*' -exec rm -rf {} +

$(VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "multimm needs Python 3.11 or newer, but $(BASE_PYTHON) is" \
	        "$$($(BASE_PYTHON) --version 2>&1). Name another: make BASE_PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(BASE_PYTHON) -m venv $(VENV) || { \
	    echo "No virtual environment could be made: on Debian and Ubuntu install python3-venv" >&2; \
	    rm -rf $(VENV); exit 1; }

# A stamp per set of packages, as old as its installation: redone when pyproject.toml changes.
# Python compiles the modules that it imports; all of them would take pip half a minute.
$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --no-compile --editable ".[dev]"
	@touch $@

# The packages of CUDA are large: pip says what it loads, and how far it is.
$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV): some minutes, the first time"
	$(RUN) -m pip install --editable ".[$$(.ci/extras)]"
	@touch $@
