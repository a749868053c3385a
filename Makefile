# make demo    runs a first federation on a fresh machine (needs Python 3.11+ and make)
# make unit    runs the quick tests, in less than a minute
# make test    runs all tests but those of reliability and compose; .ci/run runs everything that CI runs
# make reliability tests kills, refusals, full disks, malformed replies, over Ray and SuperLinks (a quarter of an hour)
# make check   checks style, types, import contracts
# make bench   measures speed and memory and writes the tables of docs/performance.md (half an hour)
# make docs    writes the reference and results pages, the editors' stub, and the docs site in site/
# make sbom    writes the bill of materials, with licences, of what the lock names
# make audit   asks whether the locked packages have known vulnerabilities
# make wheel   installs the wheel into an empty environment of PYTHON and runs a first federation there
# make compose tests the compose federation: image, three clients, attacks (needs a container engine)
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COMPILED := .venv/.compiled
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
# Empty: compiled modules are kept, which halves the time that a process takes to start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo wheel test unit reliability nightly compose check bench docs sbom audit clean lock
.DEFAULT_GOAL := help

help:
	@sed -n '1,11s/^# //p' Makefile

.boot/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedcross needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make demo PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .boot
	.boot/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9

$(READY): .boot/bin/uv requirements.lock pyproject.toml
	test -x $(BIN)/python || .boot/bin/uv venv --quiet --python $(PYTHON) .venv
	VIRTUAL_ENV=.venv .boot/bin/uv pip sync --quiet --require-hashes requirements.lock
	VIRTUAL_ENV=.venv .boot/bin/uv pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: $(READY)
	rm -rf outputs/demo
	$(BIN)/fedcross experiment=demo hydra.sweep.dir=outputs/demo
	$(BIN)/fedcross report outputs/demo --no-html --out outputs/demo

# One process compiles what the tests import. Without it each of the parallel ones compiles all of torch and Flower.
$(COMPILED): $(READY)
	$(BIN)/python -m pytest -q --collect-only tests > /dev/null
	touch $(COMPILED)

# One Ray and one SuperLink federation included.
test: $(COMPILED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/faults -m "not compose"

unit: $(COMPILED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/faults -m "not slow"

reliability: $(READY)
	$(BIN)/python -m pytest -s --timeout 3600 tests/faults

# The SuperLink tests with Flower's newest nightly build, in an environment of its own.
nightly: $(READY)
	@rm -rf .nightly && .boot/bin/uv venv --quiet --python $(PYTHON) .nightly && export VIRTUAL_ENV=.nightly && \
	.boot/bin/uv pip sync --quiet --require-hashes requirements.lock && .boot/bin/uv pip uninstall --quiet flwr && \
	.boot/bin/uv pip install --quiet --prerelease allow flwr-nightly && \
	.boot/bin/uv pip install --quiet --no-deps --no-build-isolation --editable . \
	|| { echo "LEFT OUT: flwr-nightly does not install beside the locked packages."; exit 0; }; \
	.nightly/bin/python -m pytest -m superlink tests/e2e/test_same_result.py

# Tests the compose federation; needs a container engine, and BASE_IMAGE where the Dockerfile's cannot be fetched.
compose: $(READY)
	$(BIN)/python -m pytest -s --timeout 2400 -m compose tests/e2e/test_compose.py

# Installs the wheel into an empty environment of PYTHON and runs a first federation there.
wheel: .boot/bin/uv
	rm -rf build/wheel && .boot/bin/uv build --quiet --wheel --out-dir build/wheel .
	.boot/bin/uv venv --quiet --python $(PYTHON) build/wheel/env
	VIRTUAL_ENV=build/wheel/env .boot/bin/uv pip install --quiet --constraint requirements.lock build/wheel/*.whl
	cd build/wheel && env/bin/fedcross method=fedcross task=digits rounds=3 output=run

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.results_page
	$(BIN)/python -m docs.stub
	$(BIN)/zensical build --strict --clean

sbom: $(READY)
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json $(BIN)/python

# Says what it found, or that it could look nothing up; neither is a failure of the code that is tested.
audit: $(READY)
	@said=$$(timeout 600 $(BIN)/pip-audit --disable-pip --require-hashes --progress-spinner off -r requirements.lock 2>&1); code=$$?; \
	all=$$(grep -c "^[A-Za-z0-9].*==" requirements.lock); left=$$(grep -c "could not be audited" <<< "$$said"); \
	if grep -q "Found .* known vulnerabilit" <<< "$$said"; then echo "pip-audit: KNOWN VULNERABILITIES"; grep -v "could not be audited" <<< "$$said"; \
	elif [ $$code -ne 0 ] || [ $$left -ge $$all ]; then echo "LEFT OUT: pip-audit could look nothing up (exit code $$code):"; tail -n 2 <<< "$$said"; \
	else echo "pip-audit: no known vulnerability in $$((all - left)) of $$all locked packages; the others could not be looked up"; fi

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

lock: .boot/bin/uv
	.boot/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --extra dev pyproject.toml -o requirements.lock
	.boot/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --constraint requirements.lock \
	  --no-emit-package ray --extra data pyproject.toml -o deploy/requirements.txt

clean:
	rm -rf .venv .nightly .boot build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
