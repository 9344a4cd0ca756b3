# Every target does its own set-up in .venv. The machine needs Python >= 3.10 with its venv module, make, and a C/C++
# compiler. What is installed is remembered in .venv/.stamp-*, so a second run installs nothing.

PYTHON ?= python3
VENV ?= .venv
# Test processes. Most tests are pure Python and use one core each; 0 runs them in one process, to debug.
JOBS ?= 2
# That `make wheel` builds for. A compiler for another kind than this machine's: Debian's g++-aarch64-linux-gnu, or
# CXX_aarch64="..." (CXX_x86_64).
MACHINES ?= x86_64 aarch64
# Of the tests that are not slow: quick, a part of the rest such as 1/2, both (quick,1/2), or all. See tests/tiers.py.
TIER ?= quick
# Passed on: make demo ARGS="...", make test ARGS="-k pivot".
ARGS ?=

BIN := $(VENV)/bin
# -qq: errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# Each takes 40 s of a core. CI checks the oldest and the newest: what a version in between lacks, one of them lacks.
MYPY_VERSIONS ?= 3.10 3.11 3.12 3.13 3.14

EXTRAS_cli := cli,plot
EXTRAS_dev := dev
EXTRAS_docs := docs

.DEFAULT_GOAL := help
.PHONY: help demo native wheel test test-all mutants gates lint format docs links clean
.NOTPARALLEL:

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-cli ## Run the demonstration on this machine: make demo ARGS="...".
	$(BIN)/tilestream demo $(ARGS)

native: $(VENV)/.stamp-dev ## Build the native call path (csrc/) for this source tree; needs a C++20 compiler.
	$(BIN)/python -m tilestream_tools.native_build

wheel: $(VENV)/.stamp-dev ## Build wheels with the native call path into dist/, for each kind of Linux with a compiler here.
	@for machine in $(MACHINES); do \
		if found=`$(BIN)/python -m tilestream_tools.native_build $$machine 2>&1`; then \
			echo "$$found"; \
			TILESTREAM_BUILD_NATIVE=$$machine $(PIP) wheel --no-deps --no-build-isolation -w dist . || exit 1; \
		else \
			echo "left out: $$machine: $$found"; [ $$machine != `uname -m` ] || exit 1; \
		fi; \
	done

test: $(VENV)/.stamp-dev ## Run the quick tests: no GPU needed, four minutes on two idle cores.
	$(BIN)/python -m pytest -q -m "not slow and not gpu" -n $(JOBS) --dist worksteal --tier $(TIER) --durations 10 $(ARGS)

test-all: $(VENV)/.stamp-dev ## Run every test that needs no GPU, the exhaustive ones too.
	$(BIN)/python -m pytest -q -m "not gpu" -n $(JOBS) --timeout 1800 $(ARGS)

mutants: $(VENV)/.stamp-dev ## Judge mutants by the closest tests, from where the last run ended: make mutants ARGS="--seconds 3600".
	cd tests && ../$(BIN)/python -m mutants.drawn --processes $(JOBS) $(ARGS)

gates: $(VENV)/.stamp-dev ## Compile the kernels that the gates' record does not hold yet: make gates ARGS="--seconds 3600".
	$(BIN)/python tests/kernels/gates/held.py --processes $(JOBS) $(ARGS)

lint: $(VENV)/.stamp-dev ## Check style, formatting, and types for every supported Python.
	@failed=0; run() { echo "$$*"; "$$@" || failed=1; }; \
	run $(BIN)/ruff check; \
	run $(BIN)/ruff format --check; \
	echo "mypy for Python $(MYPY_VERSIONS)"; \
	printf '%s\n' $(MYPY_VERSIONS) | xargs -P $(if $(filter-out 0 auto,$(JOBS)),$(JOBS),1) -I VERSION $(BIN)/mypy --python-version VERSION || failed=1; \
	exit $$failed

format: $(VENV)/.stamp-dev ## Format the code and mend what ruff can mend.
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: $(VENV)/.stamp-docs ## Build the documentation into docs/_build/html; a missing page, picture, anchor or name is an error.
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

links: $(VENV)/.stamp-docs ## Look up the other addresses on the documentation's pages; needs the network.
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

clean: ## Remove everything that make made, .venv too.
	rm -rf $(VENV) docs/_build build dist src/tilestream/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.stamp-venv:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
		{ echo "tilestream: no '$(PYTHON)' here. Name a Python >= 3.10: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "tilestream: needs Python >= 3.10. '$(PYTHON)' says: `$(PYTHON) --version 2>&1 | head -n 1`." \
			"Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "tilestream: '$(PYTHON) -m venv' failed; some systems ship it apart (python3-venv)." >&2; exit 1; }
	@touch $@

# torch by itself and first: what comes later finds it installed, and cannot bring another build of it.
$(VENV)/.stamp-torch: constraints.txt $(VENV)/.stamp-venv
	@echo "Installing torch (once)"
	@$(PIP) install -c constraints.txt torch
	@touch $@

$(VENV)/.stamp-%: pyproject.toml constraints.txt src/tilestream/_version.py $(VENV)/.stamp-torch
	@echo "Installing tilestream[$(EXTRAS_$*)] (once)"
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS_$*)]'
	@touch $@
