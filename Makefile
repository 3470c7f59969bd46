# Targets start from a bare machine: Python 3.10+ and make. BOOTSTRAP= names the Python that makes .venv, TRANSFORMERS= and
# TORCH= versions in place of the pinned ones. PYTHON= names another interpreter for test-gpu and bench, which then install
# nothing.

BOOTSTRAP ?= python3
CONSTRAINTS := constraints.txt
VENV := .venv
BIN := $(VENV)/bin
COMMAND := $(VENV)/.command
STAMP := $(VENV)/.installed
PYTHON ?= $(BIN)/python
WORKERS ?= 2
SOURCES := hf_sparse_attn kernels eval notebooks tests docs
GPU_GROUPS := test-gpu-marked test-gpu-ops test-gpu-methods test-gpu-models

.PHONY: help install demo notebooks test test-more test-quantized versions test-lowest test-gpu $(GPU_GROUPS) cuda bench docs docs-serve package lint format

help:
	@echo "make demo      compare dense attention, Quest and KeyCodes on SmolLM2-135M, on CPU or CUDA"
	@echo "make notebooks execute the notebooks, with their outputs in build/notebooks"
	@echo "make test      lint, types and the tests that run on CPU"
	@echo "make test-more the rest of the large grids and the contracts as another processor rounds, and test-quantized;"
	@echo "               CI runs it too"
	@echo "make test-quantized  torchao's and bitsandbytes' weights, with both installed beside .venv"
	@echo "make versions  the contracts on the installed versions, as a row of docs/compatibility.md (SELECT=: a part of them)"
	@echo "make test-lowest  the same on the lowest versions that pyproject.toml allows, in an environment of its own"
	@echo "make test-gpu  the tests that need CUDA (-j4: side by side; PYTHON=python3 uses that interpreter and installs nothing)"
	@echo "make bench     time the kernels and generate() on CUDA, beside dense attention (PYTHON= as above)"
	@echo "make docs      build the documentation into build/site, strictly, and look at it in a browser"
	@echo "make docs-serve  show the documentation while it is being written"
	@echo "make package   build and check the distributions, and use the wheel in an environment of its own"
	@echo "make lint      ruff, mypy, import-linter, and the schemas of the workflows and of CITATION.cff"
	@echo "make format    ruff format, and what ruff can fix"

install: $(STAMP)

ifneq ($(TRANSFORMERS)$(TORCH),)
CONSTRAINTS := $(VENV)/constraints.txt
$(CONSTRAINTS): constraints.txt
	mkdir -p $(VENV)
	sed -E '$(if $(TRANSFORMERS),/^(transformers|huggingface-hub)==/d;)$(if $(TORCH),/^torch==/d)' constraints.txt > $@
	$(if $(TRANSFORMERS),echo "transformers==$(TRANSFORMERS)" >> $@)
	$(if $(TORCH),echo "torch==$(TORCH)" >> $@)
endif

# torch comes first and alone, so that its pin decides and nothing else pulls in another build.
$(COMMAND): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(BOOTSTRAP) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[cli]"
	touch $@

$(STAMP): $(COMMAND)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[dev,docs,eval,lm-eval,notebooks]"
	touch $@

demo: $(COMMAND)
	$(BIN)/hf-sparse-attn compare --model smollm2 --method quest,keycodes --token-budget 256 --passkey-tokens 2000

notebooks: $(STAMP)
	$(BIN)/python notebooks/run.py --jobs $(WORKERS) --timeout 900

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# One torch thread per worker: more would only make the workers wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The rest of the large grids, which has caches in random order, and the contracts, as another processor rounds; and
# quantized weights. The contracts that run twice are those in which rounding can decide, for they compare what was
# chosen, or tokens (tests/conftest.py lists them). Those about a model's state, its server, and compiled steps, which
# are compared with eager ones of the same run, are left out.
test-more: $(STAMP) test-quantized
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "grid or contract"

# Beside .venv, not in it: with torchao, every import of Transformers takes seconds more and prints warnings.
QUANTIZED := build/quantized
test-quantized: $(STAMP)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) --no-deps --upgrade --target $(QUANTIZED) bitsandbytes torchao
	PYTHONPATH=$(QUANTIZED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "grid or not grid" \
		tests/tools/test_quantized.py

# A row of tests/versions.json. SELECT is a part of the contracts: pytest's -k expression.
SELECT ?= all
versions: $(STAMP)
	$(BIN)/python -m tests.versions -k "$(SELECT)"

# The lower bounds in pyproject.toml decide, not the pins.
LOWEST := build/lowest
lowest = "$(1)==$$(sed -nE 's/^    "$(1)>=([0-9.]+).*/\1/p' pyproject.toml)"
test-lowest:
	test -x $(LOWEST)/bin/python || $(BOOTSTRAP) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install $(call lowest,torch)
	$(LOWEST)/bin/python -m pip install $(call lowest,torch) $(call lowest,transformers) accelerate hypothesis "numpy<2.4" pytest # as Triton 3.4 needs
	PYTHONPATH=.:kernels/torch-ext $(LOWEST)/bin/python -m tests.versions -k "$(SELECT)"

ifeq ($(PYTHON),$(BIN)/python)
GPU_TESTS := tests
$(GPU_GROUPS) bench cuda: $(STAMP)
else # what needs no more than torch, triton and transformers
GPU_TESTS := tests/ops tests/cache tests/test_compiled.py tests/test_devices.py tests/test_sinks.py tests/reliability
endif
# Four groups, since most of the time is compilation on the host: `make -j4 test-gpu` runs them side by side.
test-gpu: $(GPU_GROUPS)
$(GPU_GROUPS): cuda
cuda:
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'a CUDA device is needed, and torch finds none'"
test-gpu-marked:
	$(PYTHON) -m pytest -m gpu $(GPU_TESTS)
test-gpu-ops:
	$(PYTHON) -m pytest -m "not gpu and not grid" tests/ops
test-gpu-methods:
	$(PYTHON) -m pytest -m "not gpu and not grid" tests/methods tests/clusters tests/context tests/test_contracts.py
test-gpu-models:
	$(PYTHON) -m pytest -m "not gpu and not grid" tests/test_compiled.py tests/patch tests/cache

# The documentation's tables are made from the results when it is built. README's picture is redrawn here, from
# whatever results there are, also where a measurement failed.
bench:
	failed=0; \
	$(PYTHON) kernels/benchmarks/run.py || failed=1; \
	for method in quest tokenselect; do \
		$(PYTHON) kernels/benchmarks/run.py --end-to-end --method $$method || failed=1; \
	done; \
	$(PYTHON) -m eval context-speed --shape llama-3.1-8b --context 131072 \
		--out eval/results/contexts/llama-3.1-8b-nvidia-h200.json || failed=1; \
	$(PYTHON) kernels/benchmarks/run.py --overview && test $$failed = 0

# Strictly: no broken link, no missing reference, no notebook without outputs. Nothing is fetched from elsewhere.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(STAMP) $(patsubst %,build/%,$(wildcard notebooks/*.ipynb))
	$(MKDOCS) build --strict
	$(BIN)/python -m pytest tests/docs/built_site.py

docs-serve: $(STAMP)
	$(MKDOCS) serve

# Those that were not executed since they were changed.
build/notebooks/%.ipynb: notebooks/%.ipynb | $(STAMP)
	$(BIN)/python notebooks/run.py $*

# The wheel is built from the source distribution, and used where nothing else is installed.
EMPTY := build/empty
package: $(STAMP)
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install -c $(CONSTRAINTS) torch
	$(EMPTY)/bin/python -m pip install -c $(CONSTRAINTS) "$$(echo dist/*.whl)[cli]"
	cd $(EMPTY) && bin/hf-sparse-attn methods
	cd $(EMPTY) && bin/hf-sparse-attn compare --model smollm2 --token-budget 256 --passkey-tokens 1000 --depths 0.5
