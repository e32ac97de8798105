# `make run` and `make test` start from nothing: they make .venv, install, and go.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine with an NVIDIA driver takes the CUDA build of torch that the index serves; any other the CPU build.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)

.PHONY: run test test-tiles lint types check clean bench-peers

$(VENV)/.installed: pyproject.toml constraints-cpu.txt $(wildcard setup.py kernels/native/*.cpp kernels/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

run: $(VENV)/.installed
	$(BIN)/batchllm models pull smollm2-135m
	$(BIN)/python jobs/make_data.py
	$(BIN)/batchllm run jobs/summarise.yaml
	$(BIN)/batchllm query "select finish_reason, count(*) as num_rows, round(avg(ttft_s), 3) as ttft_s, round(avg(tpot_s), 4) as tpot_s, sum(completion_tokens) as tokens from completions group by 1" jobs/summarise.yaml

# One test process a core, one thread each: two teams of threads on the same cores would spin against each other.
test: $(VENV)/.installed-dev
	$(BIN)/batchllm models pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup

# The kernels for tile units where the processor has none: the same sources over tile units in software, and what tests them.
TILES := build/emulated_tiles
test-tiles: $(VENV)/.installed-dev
	CXX=$(CURDIR)/tests/kernels/emulated_tiles/compiler $(BIN)/python setup.py --quiet build --build-base $(TILES) --build-lib $(TILES)/lib
	PYTHONPATH=$(CURDIR)/$(TILES)/lib OMP_NUM_THREADS=1 $(BIN)/pytest tests/kernels -k amx -n auto

# Beside other engines, each in an environment of its own outside of this folder (docs/performance.md). Needs a quiet machine.
PEER_VENVS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/batchllm-peers
bench-peers: $(VENV)/.installed
	$(BIN)/python benchmarks/peers/install.py --venvs $(PEER_VENVS)
	$(BIN)/batchllm models pull smollm2-135m
	$(BIN)/python benchmarks/workloads.py
	$(BIN)/python benchmarks/peers/export_model.py
	$(PEER_VENVS)/openvino/bin/python benchmarks/peers/convert_openvino.py
	$(BIN)/python benchmarks/compare.py --venvs $(PEER_VENVS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build *.egg-info
