# `make quickstart` and `make test` are all the set-up a fresh machine needs.
# Nothing is written outside runs/, data/ and .venv/.
# The checkout itself is installed editable, so that its scripts find the library from any directory.

PYTHON ?= python3
# the environment; for a checkout that cannot be written to, VENV=/absolute/path
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
HERE   := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))
# what `make download` has left; installations take nothing from elsewhere then
WHEELS ?= wheels
FROM   := $(if $(wildcard $(WHEELS)/.complete),--no-index --find-links "$(WHEELS)")
TEXT   ?=
# family of the quickstart's model: neox, llama, gpt2, moe or bert
MODEL  ?= neox
# where the quickstart's data and runs go, if not into the checkout
DIR    ?=
# another index for torch alone, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cu126, or .../whl/cpu
TORCH_INDEX ?=
# accelerators that are not NVIDIA's: ascend, rocm or xpu takes torch from requirements/requirements-$(ACCELERATOR).txt
ACCELERATOR ?=
# the lock; with such an accelerator without torch and what torch pins, which would be put in place of its own
LOCK := $(if $(ACCELERATOR),$(VENV)/lock-$(ACCELERATOR).txt,requirements/constraints.txt)
# how many tests run at once, and which; one more than the cores, because many wait for processes that they started
TEST_JOBS ?= 3
TESTS ?= tests
# which part of `make test-all`: K/N is the K-th of N
SHARD ?= 1/1
# a file is one unit of work; in alphabetical order the long ones come first, and unit tests fill what is left
TEST_FLAGS := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -q --durations=20 -o cache_dir="$(HERE)/cache/pytest"

# every cache that a tool would put into the home directory or beside the sources goes into the environment
CACHE := $(HERE)/cache
export PYTHONPYCACHEPREFIX    := $(CACHE)/pycache
# images of containers set it; every process of a test would then compile the library again
export PYTHONDONTWRITEBYTECODE :=
export TORCH_EXTENSIONS_DIR   := $(HERE)/torch_extensions
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export TRITON_CACHE_DIR       := $(CACHE)/triton
export PIP_CACHE_DIR          ?= $(CACHE)/pip
export MPLCONFIGDIR           := $(CACHE)/matplotlib
export RUFF_CACHE_DIR         := $(CACHE)/ruff
export MYPY_CACHE_DIR         := $(CACHE)/mypy

# after each failure of pip, which blames versions if it cannot read what packages need
export NOT_INSTALLED := error: packages could not be installed; if connections failed above, set https_proxy and no_proxy where only a \
  proxy leads out, or run `make download` on a machine with a network and copy wheels/ here (again, if requirements/ has changed since)

.DEFAULT_GOAL := help
.PHONY: help install install-dev download lock dist quickstart test test-all test-matrix test-trackers transformers-4 lint reference docs clean distclean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

install: $(VENV)/.installed  ## set up .venv with what training on this machine needs

install-dev: $(VENV)/.installed-dev  ## the same, and what the tests need

$(VENV)/.installed: requirements/requirements.txt requirements/constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -w . || case "$(VENV)" in /*) ;; *) \
	  echo "error: $(CURDIR) cannot be written to: name other directories with VENV=/path/to/venv DIR=/path/to/results" >&2; exit 1;; esac
	@test -x "$(PY)" || $(PYTHON) -m venv "$(VENV)" \
	  || { echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "# installing into $(VENV) $(if $(FROM),from $(WHEELS),: torch from PyPI is gigabytes with CUDA, 200 MB with TORCH_INDEX=https://download.pytorch.org/whl/cpu)"
ifeq ($(ACCELERATOR),)
	$(PIP) install -q $(FROM) "$$(grep -m1 '^torch==' requirements/constraints.txt)" $(if $(FROM),,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))) || { echo "$$NOT_INSTALLED" >&2; exit 1; }
	$(PIP) install -q $(FROM) -r requirements/requirements.txt -r requirements/requirements-tensorboard.txt -c requirements/constraints.txt || { echo "$$NOT_INSTALLED" >&2; exit 1; }
else
	$(PIP) install -q $(FROM) -r requirements/requirements-$(ACCELERATOR).txt || { echo "$$NOT_INSTALLED" >&2; exit 1; }
	@grep -vE '^(setuptools|torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z]*)==' requirements/constraints.txt > "$(LOCK)"
	$(PIP) install -q $(FROM) -r requirements/requirements.txt -r requirements/requirements-tensorboard.txt -c "$(LOCK)" || { echo "$$NOT_INSTALLED" >&2; exit 1; }
endif
	@if test -w .; then $(PIP) install -q $(FROM) --no-deps --editable . && rm -rf build neox.egg-info; \
	else echo "$(CURDIR)" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/neox.pth"; fi
	@touch "$@"

$(VENV)/.installed-dev: $(VENV)/.installed $(wildcard requirements/requirements-*.txt)
	$(PIP) install -q $(FROM) -r requirements/requirements-dev.txt -c "$(LOCK)" || { echo "$$NOT_INSTALLED" >&2; exit 1; }
	@touch "$@"

# Packages without wheels (DeepSpeed) are built here, so that the other machine needs no build tool but setuptools.
download: $(VENV)/.installed  ## fetch what `make quickstart` and `make test` install into wheels/, for a machine without network
	$(PIP) wheel -q -w "$(WHEELS)" "$$(grep -m1 '^torch==' requirements/constraints.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) wheel -q -w "$(WHEELS)" --find-links "$(WHEELS)" "setuptools>=77" -r requirements/requirements-dev.txt -c requirements/constraints.txt
	@touch "$(WHEELS)/.complete"

LOCKED := $(addprefix requirements/requirements-,dev.txt gcs.txt mlflow.txt comet.txt trackio.txt)
define LOCK_HEADER
# The versions with which the checkout is installed and tested, of every optional part, for Python 3.11 and newer on each
# system. `make lock` writes this file; LOCK_FLAGS=--upgrade moves every version but torch's, which is edited here.
endef
export LOCK_HEADER

# uv resolves for every Python and system at once, and keeps the versions that are in the file
lock: install  ## write requirements/constraints.txt again from the other files of requirements/
	@test -x "$(VENV)/lock/bin/uv" || { $(PYTHON) -m venv "$(VENV)/lock" && "$(VENV)/lock/bin/python" -m pip install -q uv; }
	@cp requirements/constraints.txt "$(VENV)/lock/constraints.txt" && grep '^torch==' requirements/constraints.txt > "$(VENV)/lock/torch.txt"
	"$(VENV)/lock/bin/uv" pip compile -q --universal --python-version 3.11 --fork-strategy fewest --no-build-isolation \
	  --python "$(PY)" --no-annotate --no-header -c "$(VENV)/lock/torch.txt" $(LOCK_FLAGS) -o "$(VENV)/lock/constraints.txt" $(LOCKED)
	@{ echo "$$LOCK_HEADER"; cat "$(VENV)/lock/constraints.txt"; } > requirements/constraints.txt

# with the wheel's own requirements from the registry, far from the checkout
dist: install-dev  ## sdist and wheel in dist/, and a small training with the wheel in an empty environment
	rm -rf dist "$(VENV)/build"
	$(PYTHON) -m venv "$(VENV)/build" && "$(VENV)/build/bin/python" -m pip install -q build
	"$(VENV)/build/bin/python" -m build -o dist .
	@rm -rf build neox.egg-info
	NEOX_WHEEL="$$(echo "$(CURDIR)"/dist/*.whl)" NEOX_TORCH_INDEX="$(TORCH_INDEX)" $(PY) -m pytest -q tests/end_to_end/test_wheel.py

quickstart: install  ## tokenizer, data, training, export and text, on real text (TEXT=my.txt for your own; MODEL=llama, gpt2, moe or bert)
	@$(PY) tools/quickstart.py --model $(MODEL) $(if $(TEXT),--text "$(TEXT)") $(if $(DIR),--directory "$(DIR)")

lint: install-dev  ## ruff, mypy, the import contracts and shellcheck
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/shellcheck .ci/run benchmarks/gpu.sh

test: lint  ## lint, unit, distributed and end-to-end tests
	OMP_NUM_THREADS=1 $(PY) -m pytest $(TESTS) -m "not slow" $(TEST_FLAGS)

# an interrupted run continues; the reports of several machines become one table with `tests/whole_suite.py --merge`
test-all: lint transformers-4  ## the same with the full matrices (SHARD=2/4: one of four shards)
	OMP_NUM_THREADS=1 $(PY) tests/whole_suite.py $(TESTS) --shard $(SHARD) --jobs $(TEST_JOBS) \
	  --report "$(VENV)/whole-suite/$(subst /,of,$(SHARD)).jsonl"

# exports are also read by this version: a folder that a test puts in front of the environment's packages
transformers-4: $(VENV)/transformers-4/.installed  ## install transformers 4.57 for the tests beside the environment

$(VENV)/transformers-4/.installed: requirements/requirements-transformers-4.txt | $(VENV)/.installed-dev
	rm -rf $(@D)
	$(PIP) install -q --no-deps --target $(@D) -r $<
	@touch $@

# MLflow and Trackio want an older pyarrow and pillow than the tests have: an environment of its own, in front of .venv
test-trackers: $(VENV)/trackers/.installed  ## the tests of MLflow's own server, Comet and Trackio, with their packages
	OMP_NUM_THREADS=1 $(VENV)/trackers/bin/python -m pytest \
	  tests/unit/features/test_remote_trackers.py tests/end_to_end/test_trackers.py $(TEST_FLAGS)

$(VENV)/trackers/.installed: requirements/requirements-comet.txt requirements/requirements-trackio.txt | $(VENV)/.installed-dev
	rm -rf $(@D)
	$(PY) -m venv $(@D)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	grep '^torch==' requirements/constraints.txt > $(@D)/torch.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/torch.txt "mlflow>=3.0" $(addprefix -r ,$^)
	@touch $@

# not part of .ci/run: each environment costs minutes; `MATRIX=NAME ...` chooses some
test-matrix: install-dev  ## other versions of torch, transformers and DeepSpeed, each in an environment of its own (docs/versions.md)
	$(PY) tests/version_matrix.py --directory "$(VENV)/matrix" $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(MATRIX)

reference: install  ## write the generated pages of configs/ and docs/ again
	$(PY) -m neox.config.reference
	$(PY) -m tests.combinations
	$(PY) benchmarks/which_gpu.py

docs: install-dev  ## the pages of docs/ as HTML in build/site; `.venv/bin/mkdocs serve` shows them with their search
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean:  ## remove the quickstart's data and runs
	rm -rf runs/quickstart runs/quickstart_llama runs/quickstart_gpt2 runs/quickstart_bert data/quickstart data/quickstart_bert

distclean: clean  ## remove the environment too
	rm -rf "$(VENV)" wheels dist
