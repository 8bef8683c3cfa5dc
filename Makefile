# `make` lists the targets. Each target works in a clean clone: it creates `.venv` first if necessary.
#
#   PYTHON   Python of .venv; a .venv of another Python is replaced. Default: the .venv that exists, or
#            the first one on the PATH from 3.10
#   ROWS     make demo: number of departures. Default: all
#   SINK     make demo: delta or parquet. Default: delta
#   ENGINE   make demo: engine of `follow` for the Delta table. Default: auto
#   TESTS    make test, test-servers, test-faults: arguments of pytest. Default: all tests of the target
#   AGAIN    make test, test-all: 1 reruns at most ten failed tests, twice at most
#   WORKERS  make test, test-all, test-faults: number of test processes. Default: 4, 3 and 6
#   SERVERS  make test-servers: server versions. Default: all supported
#   SPARKS   make test-spark: Spark versions or environments. Default: all
#   MINUTES  make soak: duration. Default: 30
#   SEED     make soak: seed of the run to repeat
#   TOPOLOGY make soak: cluster, single or power-loss
#   QUICK    make bench: 1 runs for less than a minute and saves no results
#   ONLY     make bench: names of benchmarks. Default: all
#   REPOSITORY_URL  make docs, dist: https://github.com/OWNER/NAME, for links to files of the repository

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
ROWS ?=
SINK ?= delta
ENGINE ?= auto
TESTS ?=
AGAIN ?=
WORKERS ?=
SERVERS ?=
SPARKS ?=
MINUTES ?=
SEED ?=
TOPOLOGY ?=
QUICK ?=
ONLY ?=
REPOSITORY_URL ?=
export REPOSITORY_URL

venv := .venv
stamp := $(venv)/.set-up
python := $(venv)/bin/python
preflight := tests/support/preflight.py
compiled := $(wildcard nats_stream_source/wire/compiled_*.pyx nats_stream_source/wire/*/compiled_*.pyx)
built = $(foreach suffix,so pyd,$(wildcard $(compiled:.pyx=.*$(suffix))))
security := connection/test_authentication connection/test_refused_connections
# The fault tests: tests/faults, all files with tests that are marked `faults`, by a fixture or a mark of theirs
# too, and the files listed here.
marked := mark\.faults\|spark_in_faults\|every_engine
scenarios = $(sort $(dir $(wildcard tests/faults/*/test_*.py tests/faults/*/*/test_*.py)) \
	$(shell grep -rl --include='test_*.py' --exclude-dir=faults '$(marked)' tests) \
	tests/compat/golden/test_golden.py tests/unit/rows/test_offsets.py tests/integration/spark/data_loss/ \
	$(patsubst %,tests/integration/jetstream/%.py,$(security) ordered/test_endless_reader))

# The tests wait for servers more than they compute: there are more workers than cores.
# tests/conftest.py puts the tests into groups, the longest first.
workers = --numprocesses $(or $(WORKERS),$(1)) --dist loadgroup --no-loadscope-reorder
reruns := --reruns 2 --max-suite-reruns 10 --rerun-show-tracebacks

# PYTHON, or that of .venv, or the first one on the PATH from 3.10; empty if none was found.
# Each candidate is run: pyenv puts names on the PATH for versions that are not installed.
new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 10))'
find_python = for name in $(or $(PYTHON),$(wildcard $(python)) python3 python3.13 python3.12 python3.11 python3.10 python); \
	do if $$name $(new_enough) >/dev/null 2>&1; then echo $$name; break; fi; done

schema := $(venv)/bin/check-jsonschema --quiet --builtin-schema vendor.github-

# `stale` if PYTHON is set and .venv has another Python; the prerequisite is then always out of date.
version_of = $(shell $(1) -c 'import sys; print(sys.version.replace(" ", ""))' 2>/dev/null)
stale := $(if $(PYTHON),$(if $(wildcard $(stamp)),$(if $(filter $(call version_of,$(PYTHON)),$(call \
	version_of,$(python))),,stale)))

.PHONY: help setup demo test test-all test-servers test-faults test-spark soak check docs workflows dist format \
	bench clean java stale

help: ## list the targets
	@echo 'Targets (see the top of the Makefile for variables):'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(firstword $(MAKEFILE_LIST)) \
		| while read -r make target text; do printf '  %-18s %s\n' "$$make $$target" "$$text"; done

setup: $(stamp) ## create .venv with the packages of all other targets

demo: java $(stamp) ## write a bucket's changes into a Delta table, with real data (ROWS=20000, ENGINE=spark)
	@$(python) -m examples.demo --sink '$(SINK)' --engine '$(ENGINE)' $(if $(ROWS),--rows '$(ROWS)')

test: java $(stamp) ## run the tests of the package: tests/unit and tests/integration (TESTS=tests/integration/demo)
	@$(python) -m pytest $(if $(TESTS),$(TESTS),$(call workers,4) $(addprefix --ignore=tests/,faults docs compat)) $(if $(AGAIN),$(reruns))

test-all: java $(stamp) ## run these, the pages' examples, golden checkpoints and quick faults, as .ci/run does
	@$(python) -m pytest $(call workers,3) $(if $(AGAIN),$(reruns))

test-servers: java $(stamp) ## run the tests marked `servers` on every supported nats-server version
	@$(python) -m tests.compat.server $(SERVERS) -- $(TESTS)

test-faults: java $(stamp) ## run the fault tests: killed servers, lost frames, full disks, attacks
	@$(python) -m pytest -m 'not sparks' $(if $(TESTS),$(TESTS),$(call workers,6) $(scenarios))

test-spark: java $(stamp) ## run the tests marked `sparks` on each Spark version, a cluster and Connect
	@$(python) -m tests.compat.spark $(SPARKS) -- $(TESTS)

soak: java $(stamp) ## write and read under random faults, then compare (MINUTES=30, SEED=7)
	@$(python) -m tests.soak --minutes '$(or $(MINUTES),30)' \
		$(if $(SEED),--seed '$(SEED)') $(if $(TOPOLOGY),--topology '$(TOPOLOGY)')

check: $(stamp) ## run ruff (lint and format), mypy, the import contracts, the limits of the tree and of prose
	@$(venv)/bin/ruff check
	@$(venv)/bin/ruff format --check
	@$(venv)/bin/mypy
	@$(venv)/bin/lint-imports --no-logo --no-cache
	@$(python) -m pytest -q tests/unit/test_tree.py tests/docs/test_prose.py

docs: $(stamp) ## regenerate the generated pages, build the site into site/, open it in Chromium if installed
	@$(python) -m docs.generate
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@SITE=site $(python) -m pytest -q -m faults tests/docs/test_site_in_browser.py

workflows: $(venv)/.extra-workflows ## check the workflows, forms and hooks of the repository, and docker/Dockerfile
	@$(schema)workflows .github/workflows/*.yml
	@$(schema)actions .github/actions/*/action.yml
	@$(schema)issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@$(schema)issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(venv)/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	@$(venv)/bin/zizmor --offline --quiet --config .github/zizmor.yml .github
	@$(venv)/bin/pre-commit validate-config
	@$(venv)/bin/hadolint docker/Dockerfile
	@if command -v actionlint >/dev/null; then actionlint; else echo 'skipped actionlint: not on the PATH'; fi

dist: $(venv)/.extra-release ## build the sdist and the wheel without the compiled modules, check both
	@rm -rf dist build
	@NATS_STREAM_SOURCE_PURE=1 $(python) -m build
	@$(python) -m twine check --strict dist/*
	@DIST=dist $(python) -m pytest -m faults tests/integration/project/test_distribution.py

format: $(stamp) ## format the code and apply the fixes of ruff
	@$(venv)/bin/ruff format
	@$(venv)/bin/ruff check --fix

bench: $(if $(QUICK),,java) $(stamp) ## run the benchmarks, write docs/internals/performance_method.md (QUICK=1, ONLY="reader spark")
	@$(python) -m benchmarks $(if $(QUICK),--quick) $(addprefix --only ,$(ONLY))

clean: ## remove .venv and the files that tools created
	@rm -rf $(venv) $(built) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site target .servers .sparks \
		spark-warehouse metastore_db derby.log *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Runs before the packages are installed, which takes minutes.
java:
	@found=$$($(find_python)); [ -z "$$found" ] || $$found $(preflight) java

$(stamp): pyproject.toml $(wildcard setup.py $(compiled) $(compiled:.pyx=.pxd)) $(stale)
	@found=$$($(find_python)); \
	if [ -z "$$found" ]; then \
		echo '$(if $(PYTHON),could not set up $(venv): $(PYTHON) is not a working Python 3.10 or newer; set another one (`make setup PYTHON=python3.12`),could not set up $(venv): no Python 3.10 or newer was found; install it (Debian and Ubuntu: `apt-get install python3 python3-venv`; macOS: `brew install python`) or set its path (`make setup PYTHON=/path/to/python3.12`))' >&2; \
		exit 1; \
	fi; \
	$$found $(preflight) venv || exit 1; \
	echo "Setting up $(venv) with $$($$found --version): the packages take a few minutes the first time."; \
	$$found -m venv $(if $(stale),--clear) $(venv) && rm -f $(built) && \
	$(python) -m pip --disable-pip-version-check install --quiet --editable '.[dev]' || { \
		echo 'could not install the packages (see above): is a package index such as PyPI reachable?' >&2; \
		exit 1; \
	}
	@touch $(stamp)

# The packages of an extra that only one target needs.
$(venv)/.extra-%: $(stamp)
	@$(python) -m pip --disable-pip-version-check install --quiet --editable '.[$*]'
	@touch $@
