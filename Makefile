# CI runs `make test test-extras`. PYTHON chooses the interpreter that creates .venv; by default the first Python >= 3.11 on the PATH.
ifndef PYTHON
PYTHON := $(shell for name in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
endif
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEER_VENV := .venv-peers
DOCS_VENV := .venv-docs
PLUGINS := -e plugins/fabricate-ema -e plugins/fabricate-diloco -e 'plugins/fabricate-fp8[torchao]' \
	-e plugins/fabricate-deepspeed -e plugins/fabricate-powersgd -e plugins/fabricate-lightning \
	-e plugins/fabricate-text

export OMP_NUM_THREADS ?= 1

.PHONY: env lint test test-extras test-gpu docs demo bench bench-peers campaign dist check-dist clean

env: $(INSTALLED)

# torch first: whichever build the machine offers then satisfies the pin, and nothing later replaces it.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "no Python >= 3.11 on the PATH; install one, or: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[tensorboard,metrics,optimi,peft,demo,examples,test]'
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PLUGINS)
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Four workers, because some tests only wait; a file at a time each: what a file's tests share is set up once, and no file waits for the end of the line.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# What needs packages that neither fabricate nor its plugins need (other frameworks, trackers, a notebook, a browser), and the long ones:
# language models, benchmarks, every launcher, short forms of campaigns, verify-resume, distributions that are built.
test-extras: bench-peers
	$(PEER_VENV)/bin/python -m pip install --quiet -r tests/extras/requirements.txt
	$(PEER_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/extras plugins/fabricate-lightning

# What needs an NVIDIA GPU, and some of it a second one. Without the tests' own conftest, which hides GPUs. `make test-gpu
# GPU_PYTHON=python3` takes an interpreter that has torch and the other packages already.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),env)
	$(GPU_PYTHON) -m pytest --confcutdir=tests/gpu tests/gpu

# The site, in build/site. A broken link or a snippet that fails ends it.
docs: env
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/$(DOCS_VENV)/bin:$$PATH $(DOCS_VENV)/bin/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs.py

# Two ranks stop half way, the same command resumes and finishes, transformers alone reads the result, and a page shows the run.
demo: train := $(BIN)/fabricate run examples/demo.py --nproc 2 -- --run-dir runs/demo --stop-at 300
demo: env
	rm -rf runs/demo
	$(train)
	$(train)
	$(BIN)/python examples/generate.py runs/demo/model
	$(BIN)/fabricate report runs/demo --html runs/demo/report.html

# Every benchmark, or PARTS of them; tables to docs/benchmarks.md. `make bench-peers` once, then PEERS=1 compares with other
# frameworks too.
bench: env
	$(if $(PEERS),$(PEER_VENV),$(VENV))/bin/python -m benchmarks $(PARTS)

# The long forms of what `make test` samples.
campaign: env
	$(BIN)/python -m campaigns.parity --out docs/parity.md
	$(BIN)/python -m campaigns.invariance --out docs/invariance.md
	$(BIN)/python -m campaigns.matrix --out docs/matrix.md
	$(BIN)/python -m campaigns.accelerator --out docs/accelerator.md
	$(BIN)/python -m campaigns.precision --out docs/precision.md
	$(BIN)/python -m campaigns.checkpoints --long --out docs/reliability.md

# It sees the packages of .venv, so that torch and Accelerate are the same ones.
bench-peers: env
	test -x $(PEER_VENV)/bin/python || $(PYTHON) -m venv $(PEER_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(PEER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fabricate-venv.pth
	$(PEER_VENV)/bin/python -m pip install --quiet -c constraints.txt -r benchmarks/peers.txt

# sdist and wheel of fabricate-trainer and of every plugin; and whether they work where nothing is but pip. For releases.
dist: env
	rm -rf dist
	for folder in . plugins/*/; do (cd $$folder && $(CURDIR)/$(BIN)/python -m hatchling build --directory $(CURDIR)/dist) || exit 1; done

check-dist:
	$(PYTHON) .ci/check_dist.py

clean:
	rm -rf $(VENV) $(PEER_VENV) build dist runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
