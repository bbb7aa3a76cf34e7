# make demo, make test: each sets up .venv on its first run, then does its job. `make help` lists the rest.
# make test-newest does the same in .venv-newest, with the newest torch and the cuDNN that it brings.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.10 or newer)
#   DEVICELESS=0        leave out the deviceless tier and the 1.3 GB cuDNN library that it needs
#   JOBS=4              test processes
#   FRONTEND=1.32.0     the cuDNN frontend to install; 1.28.0 is the slim one (1.29 on adds 490 MB)
#   TORCH='<=2.15.0'    the torch to install, as pip's requirement puts it

PYTHON     ?= python3
DEVICELESS ?= 1
JOBS       ?= 2
FRONTEND   ?= 1.28.0
TORCH      ?= ==2.13.0
# PyPI's newest torch, or what a machine's own constraints leave of it, with its own cuDNN; the newest frontend.
NEWEST_TORCH    ?= <=2.15.0
NEWEST_FRONTEND ?= 1.32.0

# What the versions of torch and cuDNN can change on a CPU: what is traced, what autograd says, numbers, imports.
VERSIONED := $(patsubst %,tests/cpu/%.py,test_imports test_samples backend/test_env backend/test_known_bad cli/test_doctor \
  functional/test_functional grad/test_grad grad/test_gradient_edges grad/test_random_gradients grad/test_saved \
  models/test_convert models/test_convert_batch_norm models/test_convert_rules models/test_dynamo models/test_fuse models/test_fuse_check \
  models/test_padded_images models/test_regions models/test_torch_compile models/test_trace models/test_training_graphs ops/test_table \
  runtime/test_aliases runtime/test_comparison runtime/test_custom_ops runtime/test_specialize runtime/test_trainable)

VENV  := .venv
OWN   := 0
CPU   := tests/cpu
PY    := $(VENV)/bin/python
BARE  := $(VENV)/.stamp-torch
BASE  := $(VENV)/.stamp-base
CUDNN := $(VENV)/.stamp-cudnn
DOCS  := $(VENV)/.stamp-docs
ZOO   := $(VENV)/.stamp-zoo
PIP   := $(PY) -m pip --disable-pip-version-check -qq
# The checkout by a path in a .pth file, which mypy and pyright follow; setuptools' own import hook they do not.
EDITABLE := --config-settings editable_mode=compat

# True where an interpreter has a CUDA build of torch: that torch is used as it is, with the cuDNN it loads.
CUDA_TORCH := -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null
CUDA_READY := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
# --system-site-packages does not reach into a venv that PYTHON is itself in; a .pth file does.
TORCH_HOME := -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))'
SITE       := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-newest zoo zoo-training zoo-bench lint docs venv clean

help:
	@echo 'make demo    set up, run the main job on a photograph, print one table, write the picture'
	@echo 'make test    set up, run the tests: tests/cpu, tests/deviceless, and tests/gpu where a GPU is'
	@echo '             (DEVICELESS=0 leaves out a tier and the 1.3 GB library that it needs)'
	@echo 'make test-newest  with the newest torch, its cuDNN and the newest frontend (6 GB in .venv-newest):'
	@echo '             the tests that their versions can change'
	@echo 'make zoo     models of timm, torchvision, transformers and diffusers (1 GB), in two parts:'
	@echo '             zoo-training trains 50 architectures for a step on the CPU, narrow ones'
	@echo '             zoo-bench measures 40 at their real sizes (cudnngraph bench zoo), resumable, into out/zoo.md;'
	@echo '             without a GPU it checks small ones by the reference executor'
	@echo 'make lint    ruff check, ruff format --check, mypy --strict'
	@echo 'make docs    the documentation as a site in build/site, with an API reference; a warning is an error'
	@echo 'make clean   remove .venv, .venv-newest and what the tools wrote'

venv: $(BASE)

# Starts from nothing, so that a run that was cut short leaves no half of an environment.
$(BARE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'error: $(PYTHON) is missing or older than 3.10; try make PYTHON=python3.12' >&2; exit 1; }
	@rm -rf $(VENV)
	@if [ $(OWN) = 0 ] && $(PYTHON) $(CUDA_TORCH); then \
	  echo 'set-up: $(PYTHON) has a CUDA build of torch; $(VENV) uses it'; \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  $(PYTHON) $(TORCH_HOME) > "$$($(PY) $(SITE))/torch-of-the-system.pth"; \
	else \
	  echo 'set-up: installing torch$(TORCH) into $(VENV)'; \
	  $(PYTHON) -m venv $(VENV) && $(PIP) install 'torch$(TORCH)'; \
	fi
	@touch $@

# The constraints keep torch as it is, and the frontend at its slim release.
$(BASE): pyproject.toml | $(BARE)
	@echo 'set-up: installing cudnngraph and its tools into $(VENV)'
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	  > $(VENV)/constraints.txt
	@echo 'nvidia-cudnn-frontend==$(FRONTEND)' >> $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt $(EDITABLE) -e '.[dev,demo]'
	@touch $@

# A CUDA build of torch brings its own cuDNN; a second copy beside it would be loaded in its place.
$(CUDNN): $(BASE)
	@if $(PY) $(CUDA_TORCH); then \
	  echo "set-up: the deviceless tier uses torch's own cuDNN"; \
	else \
	  echo 'set-up: installing the cuDNN library (1.3 GB; make test DEVICELESS=0 leaves it out)'; \
	  $(PIP) install -c $(VENV)/constraints.txt $(EDITABLE) -e '.[cudnn]'; \
	fi
	@touch $@

$(DOCS): $(BASE)
	@echo 'set-up: installing the tools of the documentation into $(VENV)'
	@$(PIP) install -c $(VENV)/constraints.txt $(EDITABLE) -e '.[docs]'
	@touch $@

docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

demo: $(BASE)
	@$(PY) examples/demo.py

zoo: zoo-training zoo-bench

zoo-training: $(ZOO)
	@$(PY) -m tests.zoo

zoo-bench: $(ZOO)
	@mkdir -p out
	@if $(PY) $(CUDA_READY); then $(PY) -m cudnngraph bench zoo --out out/zoo.md; \
	else $(PY) -m cudnngraph bench zoo --tiny --jobs 2 --out out/zoo-tiny.md; fi

$(ZOO): $(BASE)
	@$(PIP) install -c $(VENV)/constraints.txt timm torchvision transformers diffusers
	@touch $@

# Every tier runs, whatever the one before it said; the result is a failure if any tier failed.
test: $(BASE) $(if $(filter 0,$(DEVICELESS)),,$(CUDNN))
	@failed=; \
	has_tests() { find "$$1" -name 'test_*.py' 2>/dev/null | grep -q .; }; \
	run() { \
	  tier=$$1; shift; \
	  if ! has_tests $$tier; then echo "== $$tier: left out, it has no tests"; return; fi; \
	  echo "== $$tier"; \
	  $(PY) -m pytest -q "$$@" || failed="$$failed $$tier"; \
	}; \
	run tests/cpu $(CPU) -n $(JOBS) --dist worksteal; \
	if [ '$(DEVICELESS)' = 0 ]; then echo '== tests/deviceless: left out, DEVICELESS=0'; \
	else run tests/deviceless tests/deviceless -n $(JOBS) --dist worksteal; fi; \
	if $(PY) $(CUDA_READY); then run tests/gpu tests/gpu; \
	else echo '== tests/gpu: left out, torch sees no CUDA device'; fi; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; fi

test-newest:
	@$(MAKE) --no-print-directory test VENV=.venv-newest OWN=1 TORCH='$(NEWEST_TORCH)' \
	  FRONTEND='$(NEWEST_FRONTEND)' CPU='$(VERSIONED)'

lint: $(BASE)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --strict -p cudnngraph -p plans_cache

clean:
	@rm -rf .venv .venv-newest build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
