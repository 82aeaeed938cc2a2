# The README's two commands. Each makes .venv with the exact tested versions, then runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test stress benchmarks lint clean

demo: $(STAMP)
	$(BIN)/brigata train jobs/demo.toml

test: $(STAMP)
	$(BIN)/python -m pytest

stress: $(STAMP)
	$(BIN)/python -m pytest tests/stress.py

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/page.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/brigata/describe src/brigata/schedule src/brigata/cost src/brigata/simulate \
		src/brigata/validate
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Brigata needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist
