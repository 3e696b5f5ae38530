# make test works on a fresh machine with Python >= 3.10 and a C++ compiler; it installs into .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# what the compiled kernels do, tested once more without them
IN_TORCH := $(patsubst %,tests/%.py,$(patsubst %,functional/test_%,values accuracy transforms masks dtypes_and_devices) \
	context/test_hard_fits solve/causal/test_causal sequences/test_state)

.PHONY: setup native reproduce test lint format docs bench fuzz clean

setup: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py requirements-dev.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# setup has compiled the kernels; this does it again, after an edit. By its path: importing the package takes longer.
native: $(STAMP)
	$(BIN)/python src/intention/solve/native/build.py

# All experiments of the paper, quick preset, on built-in data where INTENTION_DATA has no real ones: minutes.
reproduce: $(STAMP)
	$(BIN)/intention reproduce --preset quick --out results/quick

test: $(STAMP)
	$(BIN)/pytest
	INTENTION_NATIVE=0 $(BIN)/pytest $(IN_TORCH)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(STAMP)
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

bench: $(STAMP)
	$(BIN)/python benchmarks/measure/ops.py
	$(BIN)/python benchmarks/measure/context.py
	$(BIN)/python benchmarks/measure/modules.py
	$(BIN)/python benchmarks/measure/lab.py
	$(BIN)/python benchmarks/measure/images.py
	$(BIN)/python benchmarks/measure/causal.py

fuzz: $(STAMP)
	$(BIN)/python tests/fuzzing.py --count 5000
	$(BIN)/python tests/fuzzing.py --count 5000 --grad
	$(BIN)/python tests/fuzzing_options.py --count 20000
	$(BIN)/python tests/fuzzing_options.py --count 10000 --grad

clean:
	rm -rf $(VENV) docs/_build src/intention/solve/native/_kernels.so
