# rollpipe's commands. `make help` lists them; each one sets up .venv first, if that is needed.
#   make test PYTHON=python3.12      another interpreter for a new .venv (`make clean` removes the old one)

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
JOBS ?= 2

# The caller's environment must not leak into .venv, and small networks run fastest on one thread. Hundreds of processes import the modules,
# so their bytecode is kept; `pip` does not compile what it installs, half of which nobody ever imports.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_CONSTRAINT PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export MPLBACKEND := Agg

# A name on PATH is no proof that it runs (version-manager shims), nor that it can make an environment.
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3.14 python3 python; do \
	"$$p" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# .venv counts only if its set-up came to an end, in this folder, and its interpreter still runs.
ifneq ($(wildcard $(VENV)),)
$(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -c '' 2>/dev/null || rm -f $(STAMP))
endif

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo test thorough lint sync notebooks pytest raises newest lowest gpu bench docs release export update hooks clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMP)  ## make .venv with the package (editable) and the developer tools

$(STAMP): setup.py settings.ini pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(USABLE)' >/dev/null 2>&1 || { \
	echo "rollpipe's tools need a Python from 3.10 to 3.14 with its venv module, and found none that runs$(if $(PYTHON),: '$(PYTHON)')." >&2; \
	echo "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if [ -e $(STAMP) ]; then echo "Bringing $(VENV) up to date with settings.ini and constraints.txt"; rm -f $(STAMP); \
	else echo "Setting up $(VENV) with $$("$(PYTHON)" -V) and the versions in constraints.txt, which takes some minutes"; \
	"$(PYTHON)" -m venv --clear $(VENV); fi
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "$(CURDIR)" > $(STAMP)

demo: $(STAMP)  ## train TRPO on Pendulum-v1, compare it with a random policy, leave runs/demo
	@$(BIN)/rollpipe demo

# The lint needs one core for half a minute, so the notebooks run beside it. If it fails, they end; the tests begin when both have passed.
# In a fresh clone pytest compiles the tests, which each of its processes would do: one does it beside the last notebooks.
test: $(STAMP)  ## lint, types, notebooks and the quick tests: the gate of every change
	@$(MAKE) --no-print-directory notebooks & notebooks=$$!; trap 'kill $$notebooks 2>/dev/null' EXIT INT TERM; \
	$(MAKE) --no-print-directory lint && { $(BIN)/python -m pytest -q --collect-only >/dev/null || true; } && wait $$notebooks
	@$(MAKE) --no-print-directory pytest

# The site needs tools that Python 3.10 does not have any more.
thorough: $(STAMP)  ## the slow tests (faults, kills, clusters, ranks, learning, snippets of pages) and the site: before a release
	@$(PYTEST) -m "slow and not gpu" --timeout 3600
	@! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(MAKE) --no-print-directory docs

lint: $(STAMP)  ## ruff, notebooks included, and the types of the package
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/basedpyright --pythonpath $(BIN)/python && echo "lint: ok"

sync: $(STAMP)  ## notebooks and exported modules agree
	@$(BIN)/python -m pytest -q tests/test_sync.py

notebooks: $(STAMP)  ## run every notebook, each in a process of its own, forked by one that has imported torch
	@ROLLPIPE_SHORT=1 exec $(BIN)/python tests/notebooks.py --jobs $(JOBS)

# More processes than there are cores, because many tests wait.
PYTEST = $(BIN)/python -m pytest -q --numprocesses $$(($(JOBS) + 2)) --dist loadfile --no-loadscope-reorder --durations 20

pytest: $(STAMP)  ## the quick tests, some files at a time
	@$(PYTEST)

raises: $(STAMP)  ## list the raise statements that neither a notebook nor a quick test reaches
	@mkdir -p build; rm -f build/raises.txt
	@ROLLPIPE_RAISES=$(CURDIR)/build/raises.txt $(MAKE) --no-print-directory -k notebooks pytest >build/raises.log 2>&1 || \
	echo "Not all pass while raise statements are marked, which changes the code: build/raises.log"
	@$(BIN)/python tests/raises.py build/raises.txt

newest: $(STAMP)  ## put the newest releases of what rollpipe stands on into .venv, for a test; `make clean setup` goes back
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade torch gymnasium numpy optree onnx onnxruntime pytest

lowest: $(STAMP)  ## the lowest releases that settings.ini allows, into .venv (Python 3.10), for a test; `make clean setup` goes back
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $$($(BIN)/python .ci/lowest.py)

gpu: $(STAMP)  ## the tests that use a GPU
	@$(BIN)/python -m pytest -q -m gpu --timeout 900

bench: $(STAMP)  ## every benchmark, each beside its floor
	@for f in collect engines plain_forms profiling tensor_envs vector trpo_update updates recurrent images invariants footprint train workers replay ppo; do echo "== $$f"; $(BIN)/python benchmarks/$$f.py || exit 1; done

docs: $(VENV)/.docs  ## the documentation as a site: open build/site/index.html; no server is needed
	@$(BIN)/python docs/prepare.py build/docs
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs -b html -d build/doctrees build/docs build/site
	@$(BIN)/python docs/check_links.py build/site

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "The tools for the site need Python 3.11 or later. $(VENV) has $$($(BIN)/python -V)." >&2; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

release: $(VENV)/.release  ## sdist and wheel into dist, checked as a user meets them; nothing is tagged or uploaded
	@$(BIN)/python .ci/release.py

$(VENV)/.release: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[release]'
	@touch $@

export: $(STAMP)  ## clean the notebooks and export them to modules
	@$(BIN)/nbdev_clean && $(BIN)/nbdev_export

update: $(STAMP)  ## carry small edits of exported modules back into their notebooks, then export
	@$(BIN)/nbdev_update && $(BIN)/nbdev_clean && $(BIN)/nbdev_export

hooks: $(STAMP)  ## enable the commit hook and readable notebook diffs in this clone
	@git config core.hooksPath .githooks
	@git config blame.ignoreRevsFile .git-blame-ignore-revs
	@git config diff.ipynb.textconv '$(BIN)/jupytext --to py:percent -o - <'
	@git config merge.nbdev-merge.name 'merge notebooks cell by cell'
	@git config merge.nbdev-merge.driver '$(BIN)/nbdev_merge %O %A %B %P'

clean:  ## remove .venv and everything that can be made again, but no runs
	@rm -rf $(VENV) build dist *.egg-info _proc _docs _site .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
