# One command from a fresh clone: each target makes the environment it needs, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow check format bench docs fuzz mutants dist smoke clean

demo: $(VENV)/.demo
	$(VENV)/bin/dualdp compare --out out/demo

test: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist loadgroup -m slow

check: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.test
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	touch $@ $(VENV)/.demo $(VENV)/.docs

# Peers pin versions of their own, so they live in a second environment: dp-accounting wants attrs below 24.
BENCH := .venv-bench
BENCH_PINS := $(BENCH)/constraints.txt
BENCH_PIP := $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(BENCH_PINS)

bench: $(BENCH)/.ready
	$(BENCH)/bin/python -m benchmarks speed --quick --out out/benchmarks
	$(BENCH)/bin/python -m benchmarks accounting --quick --out out/benchmarks

$(BENCH)/.ready: pyproject.toml constraints.txt benchmarks/requirements-peers.txt benchmarks/requirements-backpack.txt benchmarks/requirements-opake.txt
	$(PYTHON) -m venv $(BENCH)
	grep -v '^attrs==' constraints.txt > $(BENCH_PINS)
	$(BENCH_PIP) --editable '.[bench]' --requirement benchmarks/requirements-peers.txt
	$(BENCH_PIP) --no-deps --requirement benchmarks/requirements-backpack.txt
	$(BENCH_PIP) --no-deps --requirement benchmarks/requirements-opake.txt
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[docs]'
	touch $@

# Hostile plans, ledgers, checkpoints and command lines, 5,000 of each.
fuzz: $(VENV)/.test
	$(PY) -m tests.fuzz --examples 5000

# Faults planted one at a time in a copy of the checkout: about two hours.
mutants: $(VENV)/.test
	$(PY) -m tests.mutants

# Wheel and source distribution, checked as the index checks them.
DIST := .venv-dist
dist:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/twine check --strict dist/*

# The wheel in an environment of its own: the core's tests, then one experiment on both stacks. Other
# Pythons and versions: make smoke PYTHON=python3.13, make smoke PINS=constraints-lowest.txt
PINS := constraints.txt
SMOKE := out/smoke
smoke:
	rm -rf $(SMOKE)
	$(PYTHON) -m venv $(SMOKE)/venv
	$(SMOKE)/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(SMOKE) .
	$(SMOKE)/venv/bin/python -m pip install --quiet --constraint $(PINS) \
	  "$$(echo $(SMOKE)/*.whl)[demo,secure]" pytest pytest-xdist hypothesis mpmath
	cp -r tests pyproject.toml $(SMOKE)
	cd $(SMOKE) && venv/bin/python -m pytest -n 2 -m "not slow" tests/dualdp
	cd $(SMOKE) && venv/bin/dualdp compare --out demo

clean:
	rm -rf $(VENV) .venv-bench .venv-dist out build dist *.egg-info
