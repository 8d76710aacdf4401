# Every target does its own set-up: a virtual environment in .venv, made again only when what it depends on changes.
# PYTHON=/path/to/python3.11 picks the interpreter; pip's own settings (PIP_INDEX_URL, ...) pick where packages come from.

BIN := .venv/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A stamp is written last, so an interrupted installation is taken up again by the next run.
RUNTIME := .venv/.installed
DEV := .venv/.installed-dev
FUZZ := .venv/.installed-fuzz
PYTEST_ARGS ?=
PART ?=
BENCH_ARGS ?=

.PHONY: help demo test test-all compose-test kubernetes-test ray-test clients-test check check-types check-rest format stubs parity bench soak fuzz gpu clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         serve SmolLM2-135M on a prefill and a decode process, stream an answer, print the figures'
	@echo 'make test         proves the product in minutes   (PYTEST_ARGS="tests/kv -k slots" for a part)'
	@echo 'make test-all     the thorough tests as well      (PART=3/8 for the third of eight parts of these alone, 1,3/8 for two)'
	@echo 'make compose-test build the images and run the compose files; needs Docker, compose, openssl and promtool'
	@echo 'make kubernetes-test  build the images and run the pods of deploy/kubernetes as containers; needs Docker and compose'
	@echo 'make ray-test     serve the demo model on a Ray cluster of three nodes here, in an environment of its own'
	@echo 'make clients-test try the clients of other projects, in an environment of their own'
	@echo 'make check        format, lint, types, imports, stubs, pages'
	@echo 'make format       apply formatting and safe lint fixes'
	@echo 'make stubs        generate baton/v1 from proto/'
	@echo 'make parity       the long parity tables'
	@echo 'make bench        the benchmarks with a bound       (BENCH_ARGS="--peer PROGRAM" to measure another beside)'
	@echo 'make soak         100,000 interleavings, then MINUTES=30 of storms, faults and restarts'
	@echo 'make fuzz         hostile input for MINUTES=10'
	@echo 'make gpu          the GPU suite, with the python3 of this machine and no installation'
	@echo 'make clean        remove .venv and caches'

demo: $(RUNTIME)
	$(BIN)/baton demo

# Three processes keep two cores busy, since tests wait for services. They share compiled modules, also where the
# environment keeps Python from writing any: each of the hundreds of programs that tests start would compile them anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(DEV)
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(DEV)
	$(PYTEST) $(if $(PART),-m 'thorough and not gpu' --part $(PART),-m 'not gpu') $(PYTEST_ARGS)

compose-test: $(DEV)
	$(BIN)/python -m tests.compose

kubernetes-test: $(DEV)
	$(BIN)/python -m tests.kubernetes

ray-test: $(DEV)
	$(BIN)/python -m tests.ray

clients-test: $(DEV)
	$(BIN)/python -m tests.clients

check: $(DEV)
	$(MAKE) --jobs=2 --output-sync check-types check-rest

check-types: $(DEV)
	$(BIN)/mypy

check-rest: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.lint

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(DEV)
	$(BIN)/python -m scripts.stubs

parity: $(DEV)
	$(BIN)/python -m benchmarks.parity

bench: $(DEV)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(DEV)
	status=0; \
	$(BIN)/python -m tests.interleavings.soak --interleavings 100000 --processes 2 || status=1; \
	$(BIN)/python -m tests.storm || status=1; \
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) || status=1; \
	exit $$status

fuzz: $(FUZZ)
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

gpu:
	python3 -m pytest -c tests/gpu/pytest.ini --confcutdir=tests -p no:asyncio -p no:benchmark tests/gpu $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-clients .venv-ray .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache .fuzz build dist *.egg-info

# torch goes first, by its range alone: pip then takes the newest build on offer (a CPU build where an index has one), and
# nothing installed after it can bring in another.
$(RUNTIME): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'Baton needs Python 3.11 or newer with venv; set PYTHON=/path/to/python3'; exit 1; }
	@echo "==> .venv ($(PYTHON))"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo '==> torch (the largest download; minutes the first time)'
	$(BIN)/python -m pip install "$$($(BIN)/python scripts/requirement.py torch)"
	@echo '==> Baton and what it needs'
	$(BIN)/python -m pip install --editable '.[engine,gateway]'
	@touch $@

$(DEV): $(RUNTIME) scripts/protoc-requirements.txt
	@echo '==> tools for checks and tests'
	$(BIN)/python -m pip install --editable '.[engine,gateway,dev]'
	$(BIN)/python -m pip install --no-deps -r scripts/protoc-requirements.txt
	@touch $@

$(FUZZ): $(DEV)
	@echo '==> the coverage-guided fuzzer'
	$(BIN)/python -m pip install --editable '.[fuzz]'
	@touch $@
