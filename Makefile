# Every check that CI runs is a target here. `make` alone lists them.

PYTHON ?= python3
ARGS ?=
MODELS ?= smollm2-135m
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := specrt engines runtime exporter tools tests

# An isolated build would not heed constraints.txt, so setuptools is installed first and builds are not isolated.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Two fifths of the time of compiling all of .venv, for code that is hardly imported.
UNCOMPILED := 'transformers/models/|/tests?/|torch/(testing|_inductor|distributed)|/(pip|setuptools)/'
MYPY := ../../$(BIN)/mypy --cache-dir ../../.mypy_cache --explicit-package-bases --no-error-summary

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install test test-slow lint format types pytest demo models gpu-kit clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

install: $(STAMP)  ## Create .venv with the tested versions (again only when those change)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing specrt and the tested versions into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install --no-compile -c constraints.txt --no-build-isolation -e '.[cpu,export,test]'
	@$(BIN)/python -m compileall -qq -j 0 -x $(UNCOMPILED) $(VENV)/lib || true  # on all cores; pip uses one
	@touch $@

test: lint types pytest  ## Install, then lint, formatting, types and tests

lint: install  ## Lint, and check the formatting
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/ruff format --check --quiet $(SOURCES)

format: install  ## Fix what can be fixed by machine
	@$(BIN)/ruff check --quiet --fix --exit-zero $(SOURCES)
	@$(BIN)/ruff format --quiet $(SOURCES)

# Checkers cannot follow the editable install's finder, so they see the unpacked wheel, with the
# experiments, and the tests next to it. At the same time what runs bundles is checked for Python 3.10.
types: install  ## Check the types, strictly
	@rm -rf build
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@$(BIN)/python -m zipfile -e build/wheel/specrt-*.whl build/types
	@cp -r tools/lab build/types/specrt/tools/
	@cd build/types && { MYPYPATH=../.. $(MYPY) --num-workers 2 --config-file ../../pyproject.toml specrt ../../tests & \
		$(MYPY) --config-file ../../.ci/mypy-3.10.ini --exclude tools/lab specrt/__init__.py \
			specrt/engines specrt/runtime specrt/tools; code=$$?; wait $$! && exit $$code; }

# Two files at a time, each on one thread of torch: threads of both would wait for each other. Freed memory is kept, since
# it is soon used again.
pytest: install  ## Run the tests; ARGS="-k name" chooses some
	@OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

test-slow:  ## Run what 'make test' leaves out: more models and sizes, and more random examples
	@$(MAKE) --no-print-directory pytest ARGS="-m 'slow or hypothesis' --hypothesis-profile thorough"

demo: install  ## Export SmolLM2-135M, generate, verify, and compare with transformers (about 4 minutes)
	@$(BIN)/python -m specrt.tools.lab.demo

models: install  ## Fetch small real models for tests and trials; MODELS="smollm2-135m ..." chooses
	@$(BIN)/python -m specrt.tools.lab.models $(MODELS)

gpu-kit: install  ## Make the kit of 'specrt gpu-check', gpu-kit.tar.gz (about 2 minutes)
	@$(BIN)/python -m specrt.tools.gpu_check.make

clean:  ## Remove what the targets above made, .venv too
	@rm -rf $(VENV) build dist gpu-kit.tar.gz *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
