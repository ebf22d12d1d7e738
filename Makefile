# The two commands that matter: `make train` and `make test`. Both set up .venv first, once.

BIN := .venv/bin
PYTHON ?= python3
# What follows `fourfold train …` or `pytest …` on its command line.
ARGS ?=
# Three tests at a time, on two cores, too: many wait for processes or for a time to pass. Whoever is done first takes
# over from the others.
# One at a time, as a debugger needs it: `make test ARGS="-n 0 …"`.
TOGETHER := -n 3 --dist worksteal

# Where this is set, every process compiles PyTorch's sources anew, for ten seconds and more. Compiled once, they are
# kept in .venv; scripts/check and .ci/run say the same.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-long check documents changelog clean

help:
	@echo "make train      train a small GPT on two processes and write a report (about two minutes)"
	@echo "make test       run the test suite, three tests at a time (ARGS=\"-n 0 PATH\": one at a time)"
	@echo "make test-long  run the long sweeps as well"
	@echo "make check      house rules: lint, types, layers, the documents' commands, the wheel"
	@echo "make setup      only create .venv and install into it"
	@echo "make changelog  show the release notes that the fragments in changelog.d make"
	@echo "make clean      remove .venv, caches and build results (runs/ stays)"

setup:
	@PYTHON="$(PYTHON)" scripts/setup

train: setup
	$(BIN)/fourfold train examples/gpt_stdlib.yaml $(ARGS)

test: setup
	$(BIN)/python -m pytest $(TOGETHER) $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -m "not documents" --timeout 3600 $(ARGS)

check: setup
	scripts/check

documents: setup
	$(BIN)/python -m pytest -m documents tests/docs $(ARGS)

changelog: setup
	$(BIN)/towncrier build --draft

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
