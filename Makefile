# make digits   trains on the handwritten digits; ARGS="--num-workers 4 --name mine" reaches the script
# make test     lint, types, every test; what .ci/run calls
# make setup    what both begin with: .venv with the project and the pinned versions in it
# make servers  the storage servers that the tests start on loopback; a part of make test
# make chaos    the long forms of the proofs that failures do no harm; at most 10 minutes on two cores
# make ray-data the tests with real Ray Data, in .venv-data: with pyarrow in reach, each process of Ray is slower to start
# make bench    the benchmarks, a table each; ARGS="--runs 1" reaches the scripts, BENCH="fit reports" chooses
# make bench-peer   .venv-peer with Ray Train, for its column in those tables
#
# PYTHON=python3.12 chooses the interpreter of a new .venv.

PYTHON ?= python3
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SERVERS := $(VENV)/.servers
AZURITE := 3.33.0
EXTRAS := torch,client,examples,dev

DATA_VENV := .venv-data
DATA_STAMP := $(DATA_VENV)/.installed
PEER_VENV := .venv-peer
PEER_STAMP := $(PEER_VENV)/.installed
BENCH ?= imports startup fit memory reports recovery checkpoint s3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup digits test lint types tests chaos ray-data servers bench bench-peer format clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(STAMP)

# The stamp is written last, so that an interrupted set-up is taken up again by the next call.
# A .venv whose interpreter is gone (upgraded, or the folder was moved) is made anew. pip reads
# this layout in editable form from 21.3 on; a pip that is new enough is left as it is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python >= 3.10 is needed and $(PYTHON) is not; choose one with: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet "pip>=21.3"
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

digits: $(STAMP)
	$(PY) examples/digits.py $(ARGS)

test: lint types tests

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# mypy finds packages by folder name, and train/ is ray_lite.train only once installed: links show it that layout.
types: $(STAMP)
	@mkdir -p build/typing/ray_lite
	@cd build/typing/ray_lite && for name in __init__.py py.typed; do ln -sfn "../../../ray_lite/$$name" "$$name"; done
	@cd build/typing/ray_lite && for name in train air; do ln -sfn "../../../$$name" "$$name"; done
	cd build/typing && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p ray_lite.train

tests: $(STAMP) $(SERVERS)
	$(PY) -m pytest $(ARGS)

# A proof takes minutes: no stacks in between.
chaos: $(STAMP)
	$(PY) -m pytest -m proof -o faulthandler_timeout=0 tests/chaos $(ARGS)

ray-data: $(DATA_STAMP)
	$(DATA_VENV)/bin/python -m pytest -m ray_data tests/cluster $(ARGS)

$(DATA_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(DATA_VENV)
	$(DATA_VENV)/bin/python -m pip install --quiet "pip>=21.3"
	$(DATA_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS),data]"
	@touch $@

servers: $(SERVERS)

# Drivers and servers from PyPI, Azure's server from npm (the last one without telemetry), and OpenSSH. The last is
# installed only where that starts no service: as root, where no systemd runs.
$(SERVERS): $(STAMP) Makefile
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS),servers]"
	@grep -qs '"version": "$(AZURITE)"' build/servers/node_modules/azurite/package.json || { \
		command -v npm >/dev/null || { echo "Node.js and npm are needed for the tests' Azure server; on Debian and Ubuntu: apt install npm" >&2; exit 1; }; \
		npm install --prefix build/servers --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error azurite@$(AZURITE); }
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; command -v sshd >/dev/null || { \
		[ "$$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && command -v apt-get >/dev/null || \
			{ echo "an SSH server is needed for the tests; on Debian and Ubuntu: apt install openssh-server (it need not run)" >&2; exit 1; }; \
		{ apt-get install -y -qq --no-install-recommends openssh-server || \
			{ apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server; }; } >/dev/null; }
	@touch $@

bench: $(STAMP) $(SERVERS)
	@set -e; for name in $(BENCH); do $(PY) benchmarks/$$name.py $(ARGS); done

bench-peer: $(PEER_STAMP)

$(PEER_STAMP): benchmarks/peer-requirements.txt
	$(PYTHON) -m venv --clear $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip install --quiet --requirement $<
	@touch $@

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(DATA_VENV) $(PEER_VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
