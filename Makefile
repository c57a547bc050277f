# Two commands matter: `make demo` and `make test`. Each creates .venv on its first call.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/.installed-dev

.PHONY: help demo test lint types unit test-oldest fuzz docs bench dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train standard, Madry and friendly models on digits, and write a page about them"
	@echo "make test    ruff, mypy and the tests"
	@echo "make test-oldest   a quick part of the tests with the oldest dependencies that pyproject.toml allows"
	@echo "make fuzz    damaged files for every reader, for FUZZ_SECONDS=600 from FUZZ_SEED=0"
	@echo "make dist    the wheel and the source archive in dist/, byte for byte the same for one commit"
	@echo "make docs    the documentation site, in docs/_build/html"
	@echo "make bench   the CPU benchmarks (ratios within one run)"
	@echo "make clean   remove .venv and caches"

# torch goes first and alone, at its exact pin: a range that another package asks for may pull gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once)..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $(STAMP)

# The documentation is built by a test, so its tools are installed with those of the tests.
$(TOOLS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $(TOOLS)

demo: $(STAMP)
	@$(BIN)/sparring demo

test: lint types unit

lint: $(TOOLS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet src tests benchmarks examples release docs/conf.py docs/images

types: $(TOOLS)
	@$(BIN)/mypy

unit: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The lower bounds of pyproject.toml, in a venv of its own. torch stays at its pin: a range may pull gigabytes of CUDA.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/attacks tests/models tests/data tests/files/test_opcodes.py tests/files/test_regular.py \
	tests/objectives/test_objectives.py tests/training/test_checkpoint.py tests/training/test_run_folder.py \
	tests/training/test_config.py tests/weights/test_load.py tests/weights/test_foreign.py tests/weights/test_shipped.py \
	tests/report tests/cli/test_arguments.py tests/cli/test_main.py tests/cli/test_compare.py tests/test_contract.py

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@echo "Installing the oldest dependencies into $(OLDEST) (once); torch stays at its pin..."
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@sed -n '/^dependencies = \[/,/^\]/s/^ *"\([a-z0-9_-]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml \
		| sed "s/^torch==.*/$$(grep '^torch==' constraints.txt)/" > $(OLDEST)/bounds.txt
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/bounds.txt -e . \
		"$$(grep '^pytest==' constraints.txt)" "$$(grep '^hypothesis==' constraints.txt)"
	@touch $@

# Without foolbox, which is a tool of the tests and wants newer packages.
test-oldest: $(OLDEST)/.installed
	@echo "With $$(tr '\n' ' ' < $(OLDEST)/bounds.txt)"
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -p no:cacheprovider -W ignore \
		--ignore tests/attacks/test_foolbox.py $(OLDEST_TESTS)

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0

fuzz: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.files.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

dist: $(TOOLS)
	@$(BIN)/python release/dist.py

docs: $(TOOLS)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Without those that need a GPU, and bench_load.py, which takes a quarter of an hour and 8 GiB of disk.
NOT_HERE := $(addprefix benchmarks/bench_,fp8_conv.py passes.py load.py)

bench: $(TOOLS)
	@for file in $(filter-out $(NOT_HERE),$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build docs/_generated
