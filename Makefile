# `make` lists the targets. All of them work in a clean clone: what is missing is set up first.
#
#   PYTHON   the Python that makes the virtual environment (default: the first that is new enough)
#   ROWS     make demo: only the first so many departures
#   SINK     make demo: delta or parquet
#   TESTS    make test, make test-servers, make test-faults: what pytest is to run
#   AGAIN    make test: 1 to run a few tests that failed a second time, alone
#   SERVERS  make test-servers: only these versions
#   SPARKS   make test-spark: only these versions or places
#   MINUTES  make soak: for how long; SEED: the run to repeat; TOPOLOGY: cluster, single or power-loss
#   QUICK    make bench: 1 for a look that takes less than a minute and keeps nothing
#   ONLY     make bench: only these benchmarks

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
ROWS ?=
SINK ?= delta
TESTS ?=
AGAIN ?=
SERVERS ?=
SPARKS ?=
MINUTES ?=
SEED ?=
TOPOLOGY ?=
QUICK ?=
ONLY ?=

venv := .venv
stamp := $(venv)/.set-up
python := $(venv)/bin/python
preflight := nats_stream_source/demo/preflight.py
# The tests of trouble: the fast ones, which `make test` runs too, and wherever there are slow ones.
scenarios = $(sort tests/faults tests/clusters tests/relays tests/attack $(shell grep -l 'mark\.faults' tests/test_*.py) \
	$(patsubst %,tests/test_%.py,connection_survival direct_get_faults golden kv_crash kv_data_loss \
	kv_faults kv_restart ordered_endless retention security subscription_faults unbroken watch_faults))

# The command line's PYTHON, or the first Python on the PATH that is new enough; empty if none is.
# A name on the PATH is no proof (pyenv has one for each version that any project uses): it must run.
new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 10))'
find_python = for name in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python); \
	do if $$name $(new_enough) >/dev/null 2>&1; then echo $$name; break; fi; done

.PHONY: help setup demo test test-servers test-faults test-spark soak check docs format bench clean java

help: ## list the targets
	@echo 'Targets (see the top of the Makefile for variables):'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(firstword $(MAKEFILE_LIST)) \
		| while read -r make target what; do printf '  %-18s %s\n' "$$make $$target" "$$what"; done

setup: $(stamp) ## make .venv with everything that the other targets need

demo: java $(stamp) ## a bucket's changes into a Delta table, on real data (ROWS=20000, SINK=parquet)
	@$(python) -m nats_stream_source.demo --sink '$(SINK)' $(if $(ROWS),--rows '$(ROWS)')

test: java $(stamp) ## run the tests (TESTS=tests/test_demo.py)
	@$(python) $(if $(TESTS),-m pytest $(TESTS),tests/all.py $(if $(AGAIN),--again))

test-servers: $(stamp) ## run the tests marked `servers` on every supported nats-server version
	@$(python) tests/servers.py $(SERVERS) -- $(TESTS)

test-faults: java $(stamp) ## run all scenarios of trouble: killed servers, lost frames, full disks, attacks
	@$(python) $(if $(TESTS),-m pytest -m 'not sparks' $(TESTS),tests/all.py --slow $(scenarios))

test-spark: java $(stamp) ## run the shared scenarios on each Spark version, a cluster and Connect
	@$(python) tests/sparks $(SPARKS) -- $(TESTS)

soak: java $(stamp) ## write, read and break things for a while, then compare (MINUTES=30, SEED=7)
	@PYTHONPATH=tests $(python) -m soak --minutes '$(or $(MINUTES),30)' \
		$(if $(SEED),--seed '$(SEED)') $(if $(TOPOLOGY),--topology '$(TOPOLOGY)')

check: $(stamp) ## ruff (lint, format) and mypy
	@$(venv)/bin/ruff check
	@$(venv)/bin/ruff format --check
	@$(venv)/bin/mypy

docs: $(stamp) ## write the parts of the documents that come from the code
	@$(python) -m docs.generate

format: $(stamp) ## let ruff format and mend the code
	@$(venv)/bin/ruff format
	@$(venv)/bin/ruff check --fix

bench: $(if $(QUICK),,java) $(stamp) ## measure all, into docs/performance.md (QUICK=1, ONLY="reader spark")
	@$(python) -m benchmarks $(if $(QUICK),--quick) $(addprefix --only ,$(ONLY))

clean: ## remove .venv and all that tools have left
	@rm -rf $(venv) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist target .servers .sparks \
		spark-warehouse metastore_db derby.log *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Before the packages are fetched, which takes minutes.
java:
	@found=$$($(find_python)); [ -z "$$found" ] || $$found $(preflight) java

$(stamp): pyproject.toml
	@found=$$($(find_python)); \
	if [ -z "$$found" ]; then \
		echo '$(if $(PYTHON),$(PYTHON) is no Python 3.10 or newer that runs: name another one (`make setup PYTHON=python3.12`),No Python 3.10 or newer was found: install it (Debian and Ubuntu: `apt-get install python3 python3-venv`; macOS: `brew install python`) or name it (`make setup PYTHON=/path/to/python3.12`)).' >&2; \
		exit 1; \
	fi; \
	$$found $(preflight) venv || exit 1; \
	echo "Setting up $(venv) with $$($$found --version): the packages take a few minutes the first time."; \
	$$found -m venv $(venv) && \
	$(python) -m pip --disable-pip-version-check install --quiet --editable '.[dev]' || { \
		echo 'The packages could not be installed (see above): is a package index such as PyPI reachable?' >&2; \
		exit 1; \
	}
	@touch $(stamp)
