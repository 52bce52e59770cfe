# Every target sets up what it needs; `make demo` and `make test` work on a fresh checkout.
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: setup demo test check bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

demo: setup
	$(VENV)/bin/kvtide demo

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy analytics streams ingest kvtide

test: check
	$(PY) -m pytest

bench: setup
	$(VENV)/bin/kvtide bench all --json

clean:
	rm -rf $(VENV) .kvtide out .pytest_cache .mypy_cache .ruff_cache
