# make test works on a fresh machine with Python >= 3.10 and a C++ compiler; it installs into .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := src/intention/solve/native
SOURCES := $(NATIVE)/csrc
SITE := docs/_build/html
# what the compiled kernels do, tested once more without them
IN_TORCH := $(patsubst %,tests/%.py,$(patsubst %,functional/test_%,values accuracy transforms masks dtypes_and_devices) \
	context/test_hard_fits solve/causal/test_causal sequences/test_state)

# objects of the kernels: what has not changed is not compiled again, by pip and by the tests neither
export INTENTION_BUILD_CACHE ?= $(CURDIR)/build/native

.PHONY: setup native reproduce encoder play play-models gif test lint format docs bench fuzz wheel aarch64 clean

setup: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py requirements-dev.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# here, where its progress shows: pip hides a build's output, and then finds the objects. It says what is wrong, too.
	$(if $(filter 0,$(INTENTION_NATIVE)),,-$(PYTHON) $(NATIVE)/build.py)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# setup has compiled the kernels; this does it again, after an edit. By its path: importing the package takes longer.
native: $(STAMP)
	$(BIN)/python $(NATIVE)/build.py

# All experiments of the paper, quick preset, on built-in data where INTENTION_DATA has no real ones: minutes.
reproduce: $(STAMP)
	$(BIN)/intention reproduce --preset quick --out results/quick

# The encoder that comes with the package, trained again; it needs miniImageNet and about 25 minutes of one core.
encoder: $(STAMP)
	$(BIN)/python tools/encoder.py

# KVQ space in the browser; Ctrl-C stops it.
play: $(STAMP)
	$(BIN)/intention play

# The small models that come with it, trained again: about 20 minutes of one core.
play-models: $(STAMP)
	$(BIN)/python tools/play_models.py

# The README's animation of it, from the page itself; it needs Chromium.
gif: $(STAMP)
	$(BIN)/python tools/play_gif.py

test: $(STAMP)
	$(BIN)/pytest
	INTENTION_NATIVE=0 $(BIN)/pytest $(IN_TORCH)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# A folder that any static host serves, or the disk: nothing in it needs a network. OPEN=1 shows it.
docs: $(STAMP)
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs $(SITE)
	$(BIN)/python tools/site.py $(SITE)
	$(if $(OPEN),$(BIN)/python -m webbrowser "file://$(CURDIR)/$(SITE)/index.html")

bench: $(STAMP)
	$(BIN)/python benchmarks/measure/ops.py
	$(BIN)/python benchmarks/measure/context.py
	$(BIN)/python benchmarks/measure/modules.py
	$(BIN)/python benchmarks/measure/lab.py
	$(BIN)/python benchmarks/measure/images.py
	$(BIN)/python benchmarks/measure/causal.py
	$(BIN)/python benchmarks/measure/play.py

fuzz: $(STAMP)
	$(BIN)/python tests/fuzzing.py --count 5000
	$(BIN)/python tests/fuzzing.py --count 5000 --grad
	$(BIN)/python tests/fuzzing_options.py --count 20000
	$(BIN)/python tests/fuzzing_options.py --count 10000 --grad

# A wheel for any Linux of this processor, into dist/, and a test that installs it elsewhere.
wheel: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel ziglang
	$(BIN)/python tools/wheel.py
	$(BIN)/pytest -n0 tests/solve/native/test_build.py -k other_machines

# The kernels for another processor, compared with plain loops in an emulator; no venv is needed.
CROSS := aarch64-linux-gnu
aarch64:
	@if command -v $(CROSS)-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then set -e; mkdir -p build/aarch64; \
	  CXX=$(CROSS)-g++ $(PYTHON) $(NATIVE)/build.py --out build/aarch64/kernels.so; \
	  $(CROSS)-g++ -std=c++17 -O1 -I$(SOURCES) tests/solve/native/selftest.cpp build/aarch64/kernels.so -o build/aarch64/selftest; \
	  qemu-aarch64 -L /usr/$(CROSS) -E LD_LIBRARY_PATH=. build/aarch64/selftest; \
	else echo "aarch64: skipped, $(CROSS)-g++ or qemu-aarch64 is missing (Debian: g++-$(CROSS), qemu-user)"; fi

clean:
	rm -rf $(VENV) build dist docs/_build $(NATIVE)/_kernels.so
