# Two commands matter: `make demo` and `make test`. Each creates .venv on its first call.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/.installed-dev

.PHONY: help demo test lint types unit docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train standard, Madry and friendly models on digits, and write a page about them"
	@echo "make test    ruff, mypy and the tests"
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
	@$(BIN)/ruff format --check --quiet src tests benchmarks examples docs/conf.py docs/images

types: $(TOOLS)
	@$(BIN)/mypy

unit: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(TOOLS)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(STAMP)
	@for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build docs/_generated
