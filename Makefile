# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout with Python 3.11 or newer, make,
# and Java 17 with Maven (or Docker) for the tests' Kafka. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: setup python fresh demo test check bench clean

setup: $(VENV)/.ready fresh

$(VENV)/.ready: requirements.lock pyproject.toml | python
	@echo "setting up $(VENV) (about a minute, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.lock
	$(PIP) -e .
	@touch $@

# libcachesim (GPL) is a reference of the bench and its tests alone. It has wheels for Linux on x86-64 only: elsewhere those tests skip.
$(VENV)/.peer: $(VENV)/.ready
	@$(PIP) --only-binary :all: libcachesim==0.3.5 || echo "libcachesim cannot be had here; tests beside it will be skipped" >&2
	@touch $@

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>/dev/null || echo "not on the PATH"); \
	  echo "kvtide needs Python 3.11 or newer, and $(PYTHON) is $$found; install one and name it: make demo PYTHON=python3.12" >&2; \
	  exit 1; }

# numba keys a cached kernel by its own file, not by those of the functions it calls: after a change all of them are compiled again.
fresh: | $(VENV)/.ready
	@$(PY) -c 'from pathlib import Path; \
	  files = [(f, f.stat().st_mtime) for d in ("analytics", "streams") for f in Path(d).rglob("*")]; \
	  kernels = [(f, at) for f, at in files if f.suffix in (".nbi", ".nbc")]; \
	  changed = max(at for f, at in files if f.suffix == ".py"); \
	  [f.unlink(missing_ok=True) for f, _ in kernels if changed > min(at for _, at in kernels)]'

demo: setup
	$(VENV)/bin/kvtide demo

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy analytics streams ingest kvtide sql

test: check $(VENV)/.peer
	$(PY) -m pytest -n 2 --dist loadfile

bench: setup $(VENV)/.peer
	$(VENV)/bin/kvtide bench all --json

clean:
	rm -rf $(VENV) .kvtide out .pytest_cache .mypy_cache .ruff_cache
