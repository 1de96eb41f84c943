# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON  ?= python3
TORCH   ?= 2.13.0
RANKS   ?= 2
WORKERS ?= 2
MINUTES ?= 10
ARGS    ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install -qq --disable-pip-version-check
SAY  := @echo '==>'

# Stamps: each step is done once per .venv, and again only when pyproject.toml changes.
VENV_READY  := $(VENV)/.stamp-venv
TORCH_READY := $(VENV)/.stamp-torch-$(TORCH)
DEMO_READY  := $(VENV)/.stamp-paceline
TEST_READY  := $(VENV)/.stamp-paceline-test

.PHONY: help demo test soak orders bench promises conformance clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      set up .venv, then train a small GPT on $(RANKS) CPU ranks (about two minutes)'
	@echo 'make test      set up .venv, then lint, types, layers and all tests'
	@echo 'make soak      random training programs on processes and threads, for MINUTES=$(MINUTES)'
	@echo 'make orders    every model compiled by Inductor in every wrap order (some minutes)'
	@echo 'make bench     measure against torch; print a table and write JSON'
	@echo 'make promises  run every promise on torch and on paceline; write docs/promises.md'
	@echo 'make conformance  run torch'"'"'s own DDP tests on torch'"'"'s class and on ours; write docs/conformance.md'
	@echo 'make clean     remove .venv, caches, checkpoints and results'

demo: $(DEMO_READY)
	$(SAY) 'training on $(RANKS) ranks: paceline run -n $(RANKS) examples/train.py $(ARGS)'
	@$(BIN)/paceline run -n $(RANKS) examples/train.py $(ARGS)

test: $(TEST_READY)
	$(SAY) 'lint: ruff check, ruff format --check'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	$(SAY) 'types: mypy --strict on src'
	@$(BIN)/mypy
	$(SAY) 'layers: imports only point down'
	@$(BIN)/lint-imports --no-cache --no-logo
	$(SAY) 'tests: pytest with $(WORKERS) workers'
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

soak: $(TEST_READY)
	$(SAY) 'soak: random programs for $(MINUTES) minutes; --seed N runs one again (ARGS="--seed N")'
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

orders: $(TEST_READY)
	$(SAY) 'every model, compiled by Inductor in every wrap order'
	@PACELINE_ALL_ORDERS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/compile/test_wrap_orders.py -k inductor

bench: $(TEST_READY)
	$(SAY) 'benchmarks'
	@$(BIN)/python -m benchmarks

promises: $(TEST_READY)
	$(SAY) 'promises: torch and paceline side by side, into docs/promises.md'
	@$(BIN)/python -m tests.promises.report

conformance: $(TEST_READY)
	$(SAY) 'conformance: the tests inside the torch wheel, twice (about five minutes), into docs/conformance.md'
	@$(BIN)/python -m tests.conformance.report

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache checkpoints results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_READY):
	$(SAY) 'making $(VENV) with $(PYTHON)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_READY): $(VENV_READY)
	$(SAY) 'installing torch $(TORCH) and numpy, without which torch warns (large: the first time takes a while)'
	@$(PIP) torch==$(TORCH) numpy
	@touch $@

$(DEMO_READY): pyproject.toml $(TORCH_READY)
	$(SAY) 'installing paceline'
	@$(PIP) --editable .
	@touch $@

$(TEST_READY): pyproject.toml $(TORCH_READY)
	$(SAY) 'installing paceline with what its tests need'
	@$(PIP) --editable '.[test,lint,examples,frameworks]'
	@touch $@ $(DEMO_READY)
