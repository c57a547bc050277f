# Two commands matter: `make demo` and `make test`. Each makes .venv once and then only runs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/.installed-dev

.PHONY: demo test lint types unit bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train standard, Madry and friendly models on digits, and open the page it writes"
	@echo "make test    ruff, mypy and the tests"
	@echo "make bench   the CPU benchmarks (ratios within one run)"
	@echo "make clean   remove .venv and caches"

# torch goes first and alone, at its exact pin: a range asked for by another package may pull gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once)..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $(STAMP)

$(TOOLS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(TOOLS)

demo: $(STAMP)
	@$(BIN)/sparring demo

test: lint types unit

lint: $(TOOLS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet src tests benchmarks

types: $(TOOLS)
	@$(BIN)/mypy

unit: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

bench: $(STAMP)
	@for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
