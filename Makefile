# Two commands a newcomer needs: `make demo` and `make test`. Both work from a fresh clone with
# Python 3.11 or newer and pip, and install pinned versions into a virtual environment of their own.

PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL = $(PIP) --constraint constraints.txt
# The same versions with the hashes of their files. PyTorch is not among them: which file of it is
# right depends on the machine. Packages that are built here, from this folder, have no hash.
PIP_HASHED = $(PIP) --require-hashes --no-deps --requirement requirements.txt

.PHONY: install demo test check lint types unit docs lock clean

install: .venv/installed

EXPERIMENTS = --editable './experiments[all]'

.venv/installed: pyproject.toml experiments/pyproject.toml constraints.txt requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_HASHED)
	.venv/bin/python $(PIP_INSTALL) --editable '.[dev]' $(EXPERIMENTS)
	touch $@

demo:
	$(PYTHON) -m venv --clear .venv-demo
	.venv-demo/bin/python $(PIP_INSTALL) --editable . --editable ./experiments
	.venv-demo/bin/python -m examples.adult

test:
	$(PYTHON) -m venv --clear .venv-test
	.venv-test/bin/python $(PIP_HASHED)
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

# After a change of constraints.txt or of a dependency; needs uv. Of PyTorch only what it brings.
lock:
	printf '%s\n' '.[dev]' './experiments[all]' networkx sympy > .lock.in
	echo "torch; sys_platform == 'none'" > .lock.override
	uv pip compile .lock.in --override .lock.override --constraint constraints.txt --universal \
		--python-version 3.11.5 --generate-hashes --no-header --no-annotate --quiet \
		--no-emit-package torch --no-emit-package fcco --no-emit-package fcco-experiments \
		--output-file requirements.txt
	rm .lock.in .lock.override

clean:
	rm -rf .venv .venv-demo .venv-test .cache site build dist demo
