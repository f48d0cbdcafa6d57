.PHONY: install install-all install-bench lowest demo docs wheel test test-integration test-nightly test-cluster test-vllm test-sglang test-faults test-fuzz gpu-check compatibility lint check bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
# Let the interpreters that tests start keep compiled modules.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml constraints.txt $(wildcard native/* native/*/*)

# In the same environment, each build of the package reuses the objects of the last one.
# Python compiles a module when it is first imported; pip would compile thousands that nothing imports.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
EDITABLE := $(INSTALL) --no-build-isolation --editable
BUILD_REQUIREMENTS := import shutil, tomllib; tools = [tool for tool in ("cmake", "ninja") if not shutil.which(tool)]; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], *tools, sep="\n")

install: $(VENV)/installed

# CI installs all extras at once.
install-all: $(VENV)/all
	touch $(VENV)/installed $(VENV)/bench $(VENV)/docs

$(VENV)/installed: EXTRAS := torch,test,dev
$(VENV)/all: EXTRAS := torch,test,dev,bench,docs

$(VENV)/installed $(VENV)/all: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(BIN)/python -c '$(BUILD_REQUIREMENTS)' | xargs -d '\n' $(INSTALL)
	$(EDITABLE) '.[$(EXTRAS)]'
	touch $@

demo: install
	$(BIN)/reshard demo

test: install
	$(BIN)/python -m pytest -n 3 --dist worksteal

# The lowest versions that pyproject.toml allows, and a pandas and a pyparsing with which others work. They come before the
# others: PYTHONPATH=build/lowest make test
lowest: install
	PIP_CONSTRAINT= $(INSTALL) --no-deps --upgrade \
		--target build/lowest --requirement constraints-lowest.txt

# Each run imports only the files that have tests for it.
FILES = $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.$(1)' tests)

test-integration: install
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'integration and not nightly and not slow and not cluster and not gpu' \
		$(call FILES,integration)

# What CI leaves out; every night, and before a release.
test-nightly: install
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'nightly and not slow and not cluster and not gpu' $(call FILES,nightly)
	$(BIN)/python -m pytest -m 'nightly and cluster and not slow' $(call FILES,cluster)

test-cluster: install
	$(BIN)/python -m pytest -m 'cluster and not nightly and not slow' $(call FILES,cluster)

# In an environment with SGLang and reshard: make test-sglang SGLANG=environment
test-sglang: $(if $(SGLANG),,install)
	$(or $(SGLANG),$(VENV))/bin/python -m pytest -m sglang tests/sglang

# In an environment with vLLM and reshard: make test-vllm VLLM=environment
test-vllm: $(if $(VLLM),,install)
	$(or $(VLLM),$(VENV))/bin/python -m pytest -m vllm tests/vllm

test-faults: install
	$(BIN)/python -m tests.campaigns.faults --runs 24 --timeout 5 --slack 10

test-fuzz: install
	$(BIN)/python -m tests.campaigns.fuzz --seconds 15

compatibility: install
	$(BIN)/python -m tests.campaigns.versions

gpu-check:
	$(PYTHON) tests/gpu_check.py --out build/gpu-check

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check: lint
	$(BIN)/mypy

install-bench: $(VENV)/bench

bench: $(VENV)/bench
	mkdir -p build
	$(BIN)/python -m microbench hosts --out build/bench.jsonl; status=$$?; \
	test $$status -eq 2 || $(BIN)/python -m microbench report build/bench.jsonl --into build/bench; exit $$status

$(VENV)/bench: $(VENV)/installed
	$(EDITABLE) '.[bench]'
	touch $@

# The public docs: scheduler/ where it is installed, cross-references in the form that Markdown knows, and no spaces
# between names that share a description, which mkdocstrings would take for a type.
docs: $(VENV)/docs
	rm -rf build/site build/site-sources && mkdir -p build/site-sources
	cp -r reshard build/site-sources/ && cp -r scheduler build/site-sources/reshard/scheduler
	find build/site-sources -name '*.py' | xargs sed -E -i 's/:(class|func|mod|meth|attr|data|exc):`~?([^`]*)`/`\2`/g'
	find build/site-sources -name '*.py' | LC_ALL=C xargs sed -E -i '/^ +(self|cls),/b; :a; s/^( +[a-z_0-9]+(,\xC2\xA0[a-z_0-9]+)*), ([a-z_0-9]+(, [a-z_0-9]+)*: )/\1,\xC2\xA0\3/; ta'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f .mkdocs.yml

$(VENV)/docs: $(VENV)/installed
	$(EDITABLE) '.[docs]'
	touch $@

# BESIDE=environment also installs the wheel there, for example beside a serving engine.
wheel:
	rm -rf build/wheel
	$(PYTHON) tests/wheel_build.py build/wheel
	$(PYTHON) tests/wheel_runs.py build/wheel
	$(if $(BESIDE),$(PYTHON) tests/wheel_runs.py build/wheel --beside $(BESIDE))

clean:
	rm -rf build $(VENV)
