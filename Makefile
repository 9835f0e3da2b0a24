# `make train` and `make test` do everything on a fresh clone: they make the virtual environment,
# install what they need, and run. The second time they start at once.
#
#   make train ARGS="--set steps=100"   more arguments for the command
#   make train PYTHON=/path/to/python   another Python (3.12 or newer) for the environment
#   make train VENV= PYTHON=python3     no environment: that Python, which has all packages
#   make test JAX=0.12.0.1              another JAX, in an environment of its own
#   make records                        that results and programs are still those recorded
#   make test-mutations               that the tests see each fault of scripts/faults/
#   make test-gpu                       the kernels on a Hopper GPU
#   make notebooks                      the notebooks, executed, in build/notebooks/
#   make docs                           the pages of docs/ and an API reference, in site/
#   make goldens                        the float64 references of the ops' tests
#   make test-peers                     our layers next to those of torch, transformers and fla
#   make dist URL=https://...           files of a release in dist/, with links to that repository
#   make release-check TAG=v0.1.0       that the tag fits version, changelog and citation
#   make test-versions                  a small test with each Python and jax of scripts/versions.py
#   make constraints ARGS=--upgrade     newer versions of all packages, with their hashes (needs uv)

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
DOCS_ENV := $(VENV)/.ready-docs
NOTEBOOKS_ENV := $(VENV)/.ready-notebooks
endif

.PHONY: train test test-all records test-mutations test-gpu test-peers goldens lint format notebooks docs \
  constraints dist release-check test-versions clean

train: $(TRAIN_ENV)
	$(RUN) -m train fit --config configs/quickstart.py $(ARGS)

test: lint
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: lint
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# Two processes at once. ARGS=--all also compares the programs and models that are like others.
records: $(DEV_ENV)
	printf '%s\n' 'losses configs' 'mixers programs' | \
	  xargs -P 2 -I KINDS sh -c '$(RUN) -m tests.oracle compare KINDS $(ARGS)'

test-mutations: $(DEV_ENV)
	$(RUN) scripts/mutations.py $(ARGS)

goldens: $(DEV_ENV)
	JAX_PLATFORMS=cpu $(RUN) -m tests.ops.golden

# The other side has an environment and a Python of its own, for which its packages exist.
PEERS_PYTHON ?= python3.11
PEERS := tests/peers/requirements
AUTHORS := .venv-peers/authors
test-peers: $(DEV_ENV) .venv-peers/.ready $(AUTHORS)/.ready
	.venv-peers/bin/python -m tests.peers.record
	.venv-peers/bin/python -m tests.peers.record_tokenizers
	.venv-peers/bin/python -m tests.peers.record_text_settings
	.venv-peers/bin/python -m tests.peers.record_chat
	.venv-peers/bin/python -m tests.peers.record_adapter
	.venv-peers/bin/python -m tests.peers.record_lm_eval
	$(RUN) -m tests.peers.record_jax
	$(RUN) -m pytest tests/peers tests/pretrained/test_tokenizer_files.py \
	  tests/pretrained/test_lm_eval_answers.py tests/pretrained/test_adapters.py \
	  tests/pretrained/test_text_settings.py $(ARGS)

.venv-peers/.ready: $(PEERS).txt $(PEERS)-without-dependencies.txt
	$(PEERS_PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -r $(PEERS).txt
	.venv-peers/bin/python -m pip install --no-deps -r $(PEERS)-without-dependencies.txt
	touch $@

$(AUTHORS)/.ready: tests/peers/authors.txt .venv-peers/.ready
	rm -rf $(AUTHORS) && mkdir -p $(AUTHORS)
	while read repository commit; do folder=$(AUTHORS)/$${repository#*/}; \
	  git clone --quiet https://github.com/$$repository $$folder && \
	  git -C $$folder checkout --quiet $$commit || exit 1; done < $<
	touch $@

# Four processes at once, for Pallas compiles one kernel at a time in each.
test-gpu: $(DEV_ENV)
	printf '%s\n' 0/4 1/4 2/4 3/4 | XLA_PYTHON_CLIENT_MEM_FRACTION=0.22 xargs -P 4 -I PART \
	  $(RUN) -m pytest tests/gpu -m gpu --part PART $(ARGS)

lint: $(DEV_ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyrefly check

format: $(DEV_ENV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Each is executed, and becomes a page of the documentation. A cell takes seconds on an idle machine.
notebooks: $(NOTEBOOKS_ENV)
	JAX_PLATFORMS=cpu $(RUN) -m nbconvert --execute --to markdown \
	  --ExecutePreprocessor.timeout=600 --output-dir build/notebooks notebooks/*.ipynb

docs: $(DOCS_ENV)
	$(MAKE) notebooks
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Versions and hashes of all packages for every platform. Without ARGS=--upgrade versions stay, and
# only what pyproject.toml has changed changes. Then `make test-all`.
UV ?= uv
LOCK := $(UV) pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-header
constraints:
	$(LOCK) $(ARGS) --group build $(foreach extra,train data serve tensorboard wandb dev notebooks docs,--extra $(extra)) \
	  pyproject.toml --output-file constraints.txt
	$(LOCK) $(ARGS) --extra cuda13 --constraint constraints.txt pyproject.toml \
	  --output-file constraints-cuda13.txt

URL ?=
dist: $(DEV_ENV)
	$(RUN) scripts/release.py build $(if $(URL),--url $(URL))

release-check:
	$(or $(PYTHON),python3) scripts/release.py check $(TAG)

test-versions: $(DEV_ENV)
	$(RUN) scripts/versions.py $(ARGS)

# Removes caches and build products. Environments (.venv*), runs/ and data/ stay.
clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(VENV),)
INSTALLS := pyproject.toml constraints.txt constraints-cuda13.txt scripts/make_venv.sh \
  scripts/locked.py $(VENV)/bin/python

# The interpreter is a prerequisite so that an environment whose Python went away is made again.
$(VENV)/.ready-train: $(INSTALLS)
	@scripts/make_venv.sh $(VENV) train

$(VENV)/.ready-dev: $(INSTALLS)
	@scripts/make_venv.sh $(VENV) train,dev

$(VENV)/.ready-docs: $(INSTALLS)
	@scripts/make_venv.sh $(VENV) train,dev,notebooks,docs

$(VENV)/.ready-notebooks: $(INSTALLS)
	@scripts/make_venv.sh $(VENV) train,notebooks

$(VENV)/bin/python: ;
endif
