# Two commands do all the set-up: `make demo` and `make test`. Both build .venv on first use from constraints.txt.
# `make test-gpu PY=python3` and `make test-gpus PY=python3` take the environment that is there: torch, triton, pytest, pytest-xdist, pytest-timeout, allpairspy, and for trainers trl.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2
GPU_JOBS ?= 8
# What runs on a GPU where there is one; everything else runs on the CPU anyway.
GPU_TESTS = $(wildcard tests/kernels tests/engine tests/losses tests/parallel) $(LAYER_KERNELS)
# The tests of the fused layers' kernels; the others in tests/layers run models on the CPU.
LAYER_KERNELS = $(wildcard $(patsubst %,tests/layers/test_%.py,layer_operators norm gated_norm rope gated clamped_gate lora_dropout recipes fused_kernels layer_devices compile_layers))
# Oldest and newest supported Triton, beside the venv's own: the kernels are compiled offline under both.
TRITONS := 3.6.0 3.9.0

# Tests start many processes, which read the bytecode that the first has written.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all test-frameworks test-oldest test-oldest-torch test-newest test-gpu test-gpus test-peers mutants random lint docs candidate

demo: $(VENV)/.ready
	$(PY) examples/demo.py

# A file's tests run in one process (loadfile), which starts the ranks that they share once.
test: $(VENV)/.ready $(TRITONS:%=$(VENV)/triton-%/.ready) lint
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PY) -m pytest -n $(JOBS) tests/kernels $(LAYER_KERNELS)

# What `make test` leaves out as well: every kernel for every target, what is marked slow, repeats or each_value, such as every causal
# language model of transformers against docs/models.md, which `python -m tests.models.every` writes, and the kernels in the
# interpreter of the newest Triton.
test-all: $(VENV)/.ready $(TRITONS:%=$(VENV)/triton-%/.ready) lint
	$(PY) -m pytest --all -n $(JOBS) --dist loadfile --no-loadscope-reorder
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/triton-$(lastword $(TRITONS)) $(PY) -m pytest --all -n $(JOBS) tests/kernels $(LAYER_KERNELS)

test-gpu:
	@$(PY) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'PY: expected a Python whose torch sees a GPU, got none; run make test instead.')"
	$(PY) -m pytest -n $(GPU_JOBS) --dist worksteal -m "not offline and not ranks" $(GPU_TESTS)

# One process after the other: each takes all GPUs. A test that hangs ends after 5 minutes.
test-gpus:
	@$(PY) -c "import sys, torch; n = torch.cuda.device_count(); sys.exit(0 if n > 1 else f'PY: expected a Python whose torch sees at least 2 GPUs, got {n}; run make test instead.')"
	$(PY) -m pytest -m ranks --timeout 300 tests/kernels tests/losses tests/parallel tests/test_distributed_examples.py tests/trl_integration

# The modules of logitless.integrations with each framework's own wheel, in the versions of frameworks.txt; with
# FRAMEWORKS="verl" some of them, with FRAMEWORKS=--newest the newest versions.
FRAMEWORKS ?=
test-frameworks: $(VENV)/.ready
	$(PY) -m tests.integrations $(FRAMEWORKS)

# The oldest TRL and transformers that are supported, the latter for logitless.models alone. TRL 1.15 takes the kernels of the
# venv's TRL: its own run on a GPU alone. What transformers 4.57 needs older is installed beside it.
OLD_TRL := 1.15.0
OLD_TRANSFORMERS := 4.57.6
test-oldest: $(VENV)/trl-$(OLD_TRL)/.ready $(VENV)/transformers-$(OLD_TRANSFORMERS)/.ready
	PYTHONPATH=$(VENV)/trl-$(OLD_TRL) $(PY) -m pytest -n $(JOBS) --dist loadfile tests/trl_integration/test_versions.py \
	    tests/trl_integration/test_contracts.py tests/trl_integration/test_bad_trainers.py tests/trl_integration/test_parity.py
	PYTHONPATH=$(VENV)/transformers-$(OLD_TRANSFORMERS) $(PY) -m pytest -n $(JOBS) --dist loadfile \
	    tests/models/test_head_modules.py tests/models/test_patch.py tests/models/test_wrappers.py

# The oldest torch that is supported, on a CPU, with the Triton that it requires. Its wheel for Linux brings CUDA's libraries: 4.6 GB.
OLD_TORCH := 2.11.0
test-oldest-torch: $(VENV)/torch-$(OLD_TORCH)/.ready
	PYTHONPATH=$(VENV)/torch-$(OLD_TORCH) CUDA_VISIBLE_DEVICES= $(PY) -m pytest -n $(JOBS) --dist loadfile tests/engine tests/losses \
	    tests/parallel tests/random tests/layers tests/models tests/activations

# The newest transformers, which renames arguments and decorates forward passes, for logitless.models and the fused layers.
# What docs/models.md says of every class is of the venv's.
NEW_TRANSFORMERS := 5.24.0
test-newest: $(VENV)/transformers-$(NEW_TRANSFORMERS)/.ready
	PYTHONPATH=$(VENV)/transformers-$(NEW_TRANSFORMERS) $(PY) -m pytest -n $(JOBS) --dist loadfile \
	    tests/layers/test_bodies.py tests/layers/test_rewrite.py tests/layers/test_fuse_layers.py tests/layers/test_fused_models.py tests/layers/test_expert_gates.py \
	    tests/activations/test_fit.py tests/models/test_head_modules.py tests/models/test_patch.py tests/models/test_wrappers.py

# The rows of docs/migrate.md, and what pages say about the other libraries, beside their wheels. Those of torch and TRL
# are the venv's.
PEERS := liger-kernel==0.8.5 cut-cross-entropy==25.1.1 quack-kernels==0.6.5 unsloth_zoo==2026.10.9
test-peers: $(VENV)/peers/.ready
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/peers $(PY) -m pytest tests/test_migration.py tests/test_peer_claims.py

# 300 changes of one place each, of what is committed: two hours or more on two cores.
mutants: $(VENV)/.ready
	$(PY) -m tests.mutants --jobs $(JOBS)

# Random calls and trainers against full logits and stock TRL: another SEED draws others.
SEED ?= 1
MINUTES ?= 20
random: $(VENV)/.ready
	$(PY) -m tests.random --seed $(SEED) --minutes $(MINUTES)

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

# The site, in site/; a link that leads nowhere fails. Its tools have an environment of their own, without torch.
docs: $(VENV)/docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet

# A release candidate in dist/: wheel and source distribution, their metadata, and the wheel in an environment of its own, with
# torch alone and then with TRL. Nothing is uploaded.
candidate: $(VENV)/.ready
	rm -rf dist $(VENV)/candidate
	$(PY) -m hatchling build -d dist
	$(PYTHON) -m venv $(VENV)/candidate
	$(VENV)/candidate/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	$(VENV)/candidate/bin/python -I tests/run_readme.py 1
	$(VENV)/candidate/bin/python -I -m logitless doctor
	$(VENV)/candidate/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[trl]" twine
	$(VENV)/candidate/bin/python -I tests/run_readme.py 9
	$(VENV)/candidate/bin/python -m twine check --strict dist/*

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt $$($(PYTHON) -c \
	    "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

$(VENV)/peers/.ready: $(VENV)/.ready Makefile
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) $(PEERS)
	touch $@

$(VENV)/trl-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) trl==$*
	cp $$($(PY) -c "import trl.kernels; print(trl.kernels.__path__[0])")/*.py $(@D)/trl/kernels/
	touch $@

$(VENV)/transformers-$(NEW_TRANSFORMERS)/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) transformers==$(NEW_TRANSFORMERS)
	touch $@

$(VENV)/transformers-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) transformers==$* "huggingface_hub<1" "tokenizers<0.23" \
	    datasets==4.4.2 requests urllib3 charset-normalizer certifi httpx httpcore
	touch $@

$(VENV)/torch-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-cache-dir --upgrade --target $(@D) torch==$*
	touch $@

$(VENV)/triton-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$*
	touch $@
