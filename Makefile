.PHONY: install demo test check bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
SOURCES := pyproject.toml constraints.txt $(wildcard native/*)

install: $(VENV)/installed

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[torch,test,dev]'
	touch $@

demo: install
	$(BIN)/reshard demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m microbench.loopback

clean:
	rm -rf build $(VENV)
