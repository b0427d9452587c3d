# Each target makes its own .venv from the project's files if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo docs wheel pythons test test-all flower check messages bench soak paper clean
ITEM ?=

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# the demo alone needs far less than development does
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[cli]'
	touch $@

demo: $(VENV)/.demo  ## train an MLP for every size, deploy one, compare it with the dense model (half a minute)
	rm -rf demo
	$(BIN)/lod demo

test: $(VENV)/.installed  ## run all tests but the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.installed  ## run all tests
	$(BIN)/python -m pytest -n 2

# Flower's pins and those of the rest exclude each other
FLOWER := .venv-flower
$(FLOWER)/.installed: pyproject.toml constraints.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	grep -E '^(torch|safetensors|numpy|pytest|hypothesis)==' constraints.txt > $(FLOWER)/pins.txt
	$(FLOWER)/bin/pip install --quiet --constraint $(FLOWER)/pins.txt --editable '.[federated]' \
		'flwr[simulation]' pytest hypothesis
	touch $@

flower: $(FLOWER)/.installed  ## federated training in Flower: its tests and both examples, in an environment of its own
	$(FLOWER)/bin/python -m pytest tests/integrations/test_flower.py
	cd $(FLOWER) && bin/python ../examples/flower/simulate.py
	cd $(FLOWER) && bin/python ../examples/flower/processes.py

check: $(VENV)/.installed  ## lint, formatting, types, imports between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

messages: $(VENV)/.installed  ## write all error and warning messages to tests/messages.txt
	$(BIN)/python -m tests.support.messages

bench: $(VENV)/.installed  ## measure training steps and single layers against dense ones
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/step.py --compiled
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/readme.py

docs: $(VENV)/.installed  ## build the site of the documentation, strictly, to site/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.installed  ## build wheel and sdist, and try the wheel with torch and safetensors alone
	$(BIN)/pip install --quiet build
	$(BIN)/python benchmarks/wheel.py

PYTHONS ?= $(foreach minor,10 11 12 13,$(shell command -v python3.$(minor)))

pythons: $(VENV)/.installed  ## try the wheel with each Python that is here: make pythons PYTHONS="python3.10 …"
	$(BIN)/pip install --quiet build
	$(BIN)/python benchmarks/wheel.py $(PYTHONS)

soak: $(VENV)/.installed  ## kill every command at random moments a thousand times (about an hour), count damage and locks
	$(BIN)/python benchmarks/soak.py 1000
	$(BIN)/python benchmarks/soak.py 500 --only compress distill deploy tune compare
	$(BIN)/python benchmarks/reliability.py damage locks hostile threads docs

paper: $(VENV)/.installed  ## the paper's tables and figures: make paper ITEM=toy (all of them take hours)
	$(BIN)/python -m paper $(ITEM)

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(FLOWER) .mypy_cache .pytest_cache .ruff_cache .hypothesis
