# `make test` is all that CI runs. PYTHON chooses the interpreter that creates .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PLUGINS := -e plugins/fabricate-ema -e plugins/fabricate-diloco -e 'plugins/fabricate-fp8[torchao]'

export OMP_NUM_THREADS ?= 1

.PHONY: env lint test demo clean

env: $(INSTALLED)

# torch first: whichever build the machine offers then satisfies the pin, and nothing later replaces it.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[tensorboard,metrics,demo,examples,test]'
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PLUGINS)
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# Two ranks stop half way, the same command resumes and finishes, and transformers alone reads the result.
demo: train := $(BIN)/fabricate run examples/demo.py --nproc 2 -- --run-dir runs/demo --stop-at 300
demo: env
	rm -rf runs/demo
	$(train)
	$(train)
	$(BIN)/python examples/generate.py runs/demo/model

clean:
	rm -rf $(VENV) build dist runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
