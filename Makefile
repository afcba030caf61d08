# miles_dmd2: `make` lists the targets. GNU make 3.81 or newer; the tree's path may have spaces.
#
#   PYTHON=python3.12     the Python that makes .venv (3.11 to 3.14; default python3)
#   TORCH_INDEX=URL       where torch alone comes from; default: wherever pip is told to look. On Linux PyPI's torch is
#                         the CUDA build, gigabytes; https://download.pytorch.org/whl/cpu has the small CPU build
#   ARGS="..."            further arguments for demo, demo-full, test, test-fast, test-sglang, kill-matrix and soak
#   MILES_DMD2_CACHE=DIR  where setup-sglang keeps SGLang's environment (default ~/.cache/miles_dmd2)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV_PYTHON := .venv/bin/python
PYTHON_CHOSEN := $(if $(filter file,$(origin PYTHON)),,--python-chosen)

# What is set in the caller's shell must not reach into .venv.
unexport PYTHONPATH
unexport PYTHONHOME
unexport VIRTUAL_ENV

.PHONY: help setup lint pytest test test-fast setup-sglang test-sglang kill-matrix soak audit demo demo-full clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv from requirements/lock.txt; does nothing when it is up to date
	@command -v "$(PYTHON)" > /dev/null 2>&1 || { \
	  echo 'setup: there is no "$(PYTHON)": install Python 3.11 to 3.14, or say PYTHON=/path/to/python after make' >&2; \
	  exit 1; }
	@"$(PYTHON)" scripts/setup_env.py $(PYTHON_CHOSEN) --torch-index "$(TORCH_INDEX)"

lint: setup ## ruff (rules and format) and mypy
	"$(VENV_PYTHON)" -m ruff check .
	"$(VENV_PYTHON)" -m ruff format --check .
	"$(VENV_PYTHON)" -m mypy

pytest: setup
	"$(VENV_PYTHON)" -m pytest $(ARGS)

test: lint pytest ## lint, then every test

test-fast: setup ## only the tests without Ray that take seconds
	"$(VENV_PYTHON)" -m pytest -m "not ray and not slow" $(ARGS)

setup-sglang: setup ## make SGLang's own environment, once for all checkouts: 7 GB under ~/.cache/miles_dmd2
	@"$(VENV_PYTHON)" scripts/setup_sglang.py

test-sglang: setup ## the tests against a real SGLang server; makes its environment first
	@engine="$$("$(VENV_PYTHON)" scripts/setup_sglang.py)" && \
	  MILES_DMD2_SGLANG_PYTHON="$$engine" "$(VENV_PYTHON)" -m pytest tests/sglang $(ARGS)

kill-matrix: setup ## SIGKILL every process in every phase; same bits? 20 minutes (ARGS="--engine sglang": an hour)
	"$(VENV_PYTHON)" -m tests.faults.kill_matrix --log-directory docs/results $(ARGS)

soak: setup ## 50 kills at random moments (ARGS="--kills N --seed S"): an hour
	"$(VENV_PYTHON)" -m tests.faults.kill_matrix --soak --log-directory docs/results $(ARGS)

audit: setup ## look the locked packages up among published advisories (needs pypi.org itself)
	@"$(VENV_PYTHON)" scripts/audit.py

demo: setup ## distil the digits teacher into a few-step student: minutes, on a CPU
	"$(VENV_PYTHON)" recipes/digits/run.py --steps 1 $(ARGS)

demo-full: setup ## the whole table of the digits recipe: hours
	"$(VENV_PYTHON)" recipes/digits/table.py $(ARGS)

clean: ## remove caches and build outputs; runs and .venv stay
	rm -rf build dist miles_dmd2.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv
