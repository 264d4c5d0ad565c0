# Every target installs what it needs: the virtual environment is created on the first call and updated when
# pyproject.toml or constraints.txt change. Requires git, make and Python 3.11 to 3.13.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# Flower for one test: its dependencies conflict with constraints.txt.
FLOWER := .venv-flower
# Environments of their own, with the packages of VENV (torch above all) on their path by a .pth file, except what conflicts.
PEERS  := .venvs
RAY    := $(PEERS)/ray
PFLLIB ?=
SITE   := import sysconfig; print(sysconfig.get_path("purelib"))
# The first supported Python on the path; choose another with `make venv PYTHON=/path/to/python3.12`.
RIGHT  := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(RIGHT)' 2>/dev/null && echo $$python && break; done)
# Every process of a test would compile all of edge-fl again.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process, because the tests run in two processes.
TEST   := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ARGS   ?=
# The tests of the core, which pass without an extension.
CORE   := tests/edge_fl tests/broker tests/devices tests/server

.DEFAULT_GOAL := help
.PHONY: help venv wheel demo demo-secure test core ray slow timed nightly mutation check format docs bench bench-full bench-gpu bench-peers study dossier clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create or update the virtual environment .venv

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(RIGHT)' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is not Python 3.11 to 3.13; install one (Debian: sudo apt install python3 python3-venv)" \
	    "or choose one: make venv PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: $(PYTHON) cannot create a virtual environment; install its venv module" \
	    "(Debian: sudo apt install python3-venv), then try again" >&2; exit 1; }
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## broker, server and 28 simulated devices on real digits: what a device gains, in under a minute
	$(BIN)/edge-fl demo $(ARGS)

demo-secure: venv ## the same over mTLS, each device with its own certificate; also timed in plaintext
	$(BIN)/edge-fl demo --secure --compare-plaintext $(ARGS)

test: venv ## all tests except those marked slow, timed, ray, gpu, arm64 or browser (select with ARGS='-k topics')
	$(TEST) -n 2 --dist worksteal -m 'not slow and not timed and not ray and not gpu and not arm64 and not browser' $(ARGS)

# What the core is, and that it needs no extension: import-linter says so of imports, this of everything that its tests do.
core: venv ## the same of the core alone, with all extensions blocked from import
	EDGE_FL_WITHOUT_EXTENSIONS=1 $(TEST) -n 2 --dist worksteal -m 'not slow and not timed and not ray and not gpu and not arm64 and not browser' $(CORE) $(ARGS)

ray: $(RAY)/.stamp ## tests of the engine 'ray', in an environment of its own
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/lab/test_ray.py $(ARGS)

# in one group, because the few arm64 tests take minutes in one process, next to the others
slow: venv ## tests marked slow, arm64 or browser; those that this machine does not support are skipped
	$(TEST) -n 2 --dist worksteal -m '(slow or arm64 or browser) and not (slow and arm64) and not timed and not ray and not gpu' $(ARGS)

timed: venv ## tests that measure time or memory, one at a time, because other tests would change what they measure
	$(TEST) -m timed $$(grep -rl --include=test_*.py 'mark\.timed' tests) $(ARGS)

nightly: venv $(RAY)/.stamp ## whole sweeps, of which CI runs a sample, 10,000 examples of every fuzz test, secure sums against Flower's (hours)
	test -x $(FLOWER)/bin/pip || $(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/pip install --quiet . 'flwr>=1.41,<2' pytest pytest-timeout hypothesis
	$(FLOWER)/bin/python -m pytest -W ignore tests/edge_fl/secure/test_flower.py
	$(TEST) tests/fuzz tests/chaos -n 2 --hypothesis-profile nightly --timeout 7200 $(ARGS)
	$(TEST) tests --ignore tests/chaos -n 2 --hypothesis-profile nightly -m nightly $(ARGS)
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/lab/test_ray.py --hypothesis-profile nightly -m nightly $(ARGS)

mutation: venv ## change 300 random places of the code in turn; count the changes that the tests notice (hours)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[mutation]'
	$(BIN)/python -m tools.mutation $(ARGS)

check: venv ## format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## format the code and fix lint errors
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

docs: venv ## build the documentation site in build/docs/site; a broken link is an error
	$(BIN)/python -m tools.site

bench: venv ## benchmark of this machine, in under ten minutes; results in runs/bench/
	$(BIN)/python -m tools.bench $(ARGS)

bench-full: venv ## the same with more turns per figure
	$(BIN)/python -m tools.bench --full $(ARGS)

bench-gpu: venv ## benchmark on this machine's GPU, also against PFLlib with PFLLIB=DIR (a checkout); tiny without a GPU
	test -z '$(PFLLIB)' || $(BIN)/pip install --quiet -c constraints.txt calmsize cvxpy h5py
	$(BIN)/python -m tools.bench --gpu --pfllib '$(PFLLIB)' $(ARGS)

bench-peers: venv ## edge-fl, PFLlib, Flower and pfl-research in turns (PFLLIB=DIR: a checkout of PFLlib)
	@test -d '$(PFLLIB)/system/flcore' || { echo "make: bench-peers needs PFLLIB=DIR, a clone of PFLlib at the commit" \
	  "that docs/pfllib.md names, not '$(PFLLIB)'" >&2; exit 1; }
	@for peer in flower pfl-research; do \
	  $(MAKE) $(PEERS)/$$peer/.stamp || echo "make: $$peer is not installed; it is left out" >&2; done
	$(BIN)/python -m tools.bench.peers --pfllib '$(PFLLIB)' $(ARGS)

$(RAY)/.stamp: NEEDS := -c constraints.txt -e .[scale]
$(PEERS)/flower/.stamp: NEEDS := flwr[simulation]>=1.41,<2
$(PEERS)/pfl-research/.stamp: NEEDS := pfl>=0.6,<1
$(PEERS)/%/.stamp: $(STAMP)
	$(BIN)/python -m venv $(@D)
	site=$$($(BIN)/python -c '$(SITE)') && \
	  echo "import site; site.addsitedir('$$site')" > $$($(@D)/bin/python -c '$(SITE)')/edge_fl_packages.pth
	$(@D)/bin/pip install --quiet $(foreach need,$(NEEDS),'$(need)')
	@touch $@

study: venv ## tuned methods on five datasets (about an hour); the evidence of 'edge-fl methods recommend' in runs/study/
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.study $(ARGS)

wheel: venv ## the wheel with its SBOM, and its SHA-256, in dist/
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	cd dist && sha256sum *.whl | tee SHA256SUMS

dossier: venv ## supply-chain evidence in dossier/ (TUF_CONFORMANCE=DIR: a checkout; PREVIOUS=DIR: an earlier dossier)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dossier]'
	$(BIN)/python -m tools.dossier --tuf-conformance '$(TUF_CONFORMANCE)' --previous '$(PREVIOUS)' $(ARGS)

clean: ## remove the virtual environment and all caches; keep runs/ and .data/
	rm -rf $(VENV) $(FLOWER) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
