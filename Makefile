# Two commands a newcomer needs: `make demo` and `make test`. Both work from a fresh clone with
# Python 3.11 or newer and pip, and install pinned versions into a virtual environment of their own.

PYTHON ?= python3
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: install demo test check lint types unit docs clean

install: .venv/installed

EXPERIMENTS = --editable './experiments[all]'

.venv/installed: pyproject.toml experiments/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) --editable '.[dev]' $(EXPERIMENTS)
	touch $@

demo:
	$(PYTHON) -m venv --clear .venv-demo
	.venv-demo/bin/python $(PIP_INSTALL) --editable . --editable ./experiments
	.venv-demo/bin/fcco compare fairness --data adult --quick --out demo/fairness-adult --overwrite

test:
	$(PYTHON) -m venv --clear .venv-test
	.venv-test/bin/python $(PIP_INSTALL) --editable '.[test,integrations]' $(EXPERIMENTS)
	$(MAKE) check VENV=.venv-test

# The checks of `make test` in an environment that is already there.
VENV ?= .venv
check: lint
	$(MAKE) --jobs 2 types unit VENV=$(VENV)

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types:
	$(VENV)/bin/pyright --level error --pythonpath $(VENV)/bin/python

unit:
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

docs: install
	.venv/bin/zensical build --clean --strict

clean:
	rm -rf .venv .venv-demo .venv-test .cache site build dist demo
