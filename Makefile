# Every target sets up what it needs: the virtual environment is made on the first call and again when
# pyproject.toml or constraints.txt change. All that must be there before is git, make and Python 3.11 to 3.13.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# The first Python on the path that is new enough; another one by `make venv PYTHON=/path/to/python3.12`.
RIGHT  := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(RIGHT)' 2>/dev/null && echo $$python && break; done)
# One thread per process, because the tests run in two.
TEST   := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-secure test nightly check format bench bench-full bench-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make or refresh the virtual environment .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(RIGHT)' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is no Python 3.11 to 3.13; install one (Debian: sudo apt install python3 python3-venv)" \
	    "or name it: make venv PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: $(PYTHON) cannot make a virtual environment; install its venv module" \
	    "(Debian: sudo apt install python3-venv), then try again" >&2; exit 1; }
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## broker, server and 12 devices learn on real digits, in under two minutes
	$(BIN)/edge-fl demo $(ARGS)

demo-secure: venv ## the same over mTLS, every device with its own certificate; also timed in plaintext
	$(BIN)/edge-fl demo --secure --compare-plaintext $(ARGS)

test: venv ## every test but those marked slow, gpu, arm64 or browser (ARGS='-k topics' for some)
	$(TEST) -n 2 -m 'not slow and not gpu and not arm64 and not browser' $(ARGS)

nightly: venv ## 200 runs under chaos, 10,000 examples of every fuzz test (hours)
	$(TEST) tests/fuzz tests/chaos -n 2 --hypothesis-profile nightly --timeout 7200 $(ARGS)

check: venv ## format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## bring the code into its form
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

bench: venv ## how fast the engines are on this machine, in under ten minutes: runs/bench/
	$(BIN)/python -m tests.bench $(ARGS)

bench-full: venv ## the same with more turns
	$(BIN)/python -m tests.bench --full $(ARGS)

bench-gpu: venv ## how fast the vectorised engine is on this machine's GPU
	$(BIN)/python -m tests.bench --gpu $(ARGS)

clean: ## remove the virtual environment and every cache; runs/ and .data/ stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
