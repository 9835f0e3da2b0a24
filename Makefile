# `make train` and `make test` do everything on a fresh clone: they make the virtual environment,
# install what they need, and run. The second time they start at once.
#
#   make train ARGS="--set steps=100"   more arguments for the command
#   make train PYTHON=/path/to/python   another Python (3.12 or newer) for the environment
#   make train VENV= PYTHON=python3     no environment: that Python, which has all packages
#   make test JAX=0.12.0.1              another JAX, in an environment of its own
#   make test-gpu                       the kernels on a Hopper GPU

JAX ?=
VENV := $(if $(JAX),.venv-jax-$(JAX),.venv)
PYTHON ?=
ARGS ?=
JOBS ?= 2

export PYTHON JAX

ifeq ($(VENV),)
RUN := $(or $(PYTHON),python3)
else
RUN := $(VENV)/bin/python
TRAIN_ENV := $(VENV)/.ready-train
DEV_ENV := $(VENV)/.ready-dev
endif

.PHONY: train test test-all test-gpu lint format clean

train: $(TRAIN_ENV)
	$(RUN) -m train fit --config configs/quickstart.py $(ARGS)

test: lint
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: lint
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-gpu: $(DEV_ENV)
	$(RUN) -m pytest tests/gpu -m gpu $(ARGS)

lint: $(DEV_ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyrefly check

format: $(DEV_ENV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Removes caches and build products. Environments (.venv*), runs/ and data/ stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(VENV),)
# The interpreter is a prerequisite so that an environment whose Python went away is made anew.
$(VENV)/.ready-train: pyproject.toml constraints.txt scripts/make_venv.sh $(VENV)/bin/python
	@scripts/make_venv.sh $(VENV) train

$(VENV)/.ready-dev: pyproject.toml constraints.txt scripts/make_venv.sh $(VENV)/bin/python
	@scripts/make_venv.sh $(VENV) train,dev

$(VENV)/bin/python: ;
endif
