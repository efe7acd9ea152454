# Every target sets up what it needs; a second call starts at once.
#   make compare DATA='path/train-*'     make index DATA='path/*-of-*' INDEX_DIR=path
PYTHON ?= python3
VENV ?= .venv
REHEARSAL := $(findstring --rehearse,$(ARGS))
GPU ?= $(if $(REHEARSAL),,$(if $(filter gpu-check test-gpu,$(MAKECMDGOALS))$(wildcard $(VENV)/.installed-gpu),1))
DATA ?=
VALIDATION ?=
INDEX_DIR ?=
SIZE ?=
ARGS ?=
PYTHON_SITE ?=

# With PYTHON_SITE nothing is installed: PYTHON runs with what that folder holds.
RUN := $(if $(PYTHON_SITE),PYTHONPATH='$(PYTHON_SITE):$(CURDIR)' $(PYTHON),$(VENV)/bin/python)
INSTALLED := $(or $(PYTHON_SITE),$(VENV)/.installed$(if $(GPU),-gpu))
DEVELOPED := $(INSTALLED)-dev
NIGHTLY := $(DEVELOPED)-nightly
# What is installed or compiled, apart from Python.
SETUP := pyproject.toml setup.py scripts/install.sh $(wildcard dali_tf_input/backends/native/*)
SAMPLE := data/sample
FILES := $(or $(DATA),$(SAMPLE)/train-*)
VALIDATION_FILES := $(if $(DATA),$(VALIDATION),$(SAMPLE)/validation-*)
INDEX_FLAG := $(if $(INDEX_DIR),--index_dir='$(INDEX_DIR)')
READY := $(INSTALLED) $(if $(DATA),,$(SAMPLE).complete)
INDEX := @$(RUN) -m dali_tf_input index $(INDEX_FLAG) '$(FILES)'
COMMON := --files='$(FILES)' $(INDEX_FLAG)
WORK := $(COMMON) $(if $(SIZE),--image_size=$(SIZE))
# Where Python is told to keep no bytecode, each of the tests' processes would compile the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest --dist=worksteal --durations=10

.DEFAULT_GOAL := help
.PHONY: help install data index compare train doctor profile tune preview soak gpu-check has-gpu
.PHONY: test test-slow test-nightly test-gpu check format docs wheel clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'
	@echo
	@echo "  DATA='path/train-*'  your TFRecords instead of the sample data;  VALIDATION='path/validation-*'  for train"
	@echo "  INDEX_DIR=path       where the index files are;                  SIZE=128  height and width of the images"
	@echo "  ARGS='--flag=value'  for the script, see make compare ARGS=--help"
	@echo "  PYTHON=python3.12    the Python to set up with;                  GPU=1  TensorFlow with its CUDA libraries"
	@echo "  PYTHON_SITE=path     instead of setting up: a folder that holds TensorFlow, DALI and what else is needed"

install: $(INSTALLED)  ## Set up .venv: TensorFlow, DALI, the plugin, this package (GPU=1: with CUDA libraries)

data: $(SAMPLE).complete  ## Make the sample TFRecords in data/sample

index: $(READY)  ## Index TFRecords: make index DATA='path/train-*'
	@$(RUN) -m dali_tf_input index $(INDEX_FLAG) $(ARGS) '$(or $(DATA),$(SAMPLE)/*-of-*)'

compare: $(READY)  ## The main job: images/s of this package and of tf.data and DALI by hand; also a plot in results/
	$(INDEX)
	@mkdir -p results
	@$(RUN) scripts/compare_throughput.py $(WORK) --json=results/throughput.json --plot=results/throughput.png $(ARGS)

train: $(READY)  ## Train a small network: make train DATA='path/train-*' VALIDATION='path/validation-*'
	$(INDEX) $(if $(VALIDATION_FILES),'$(VALIDATION_FILES)')
	@$(RUN) scripts/train.py $(COMMON) $(if $(VALIDATION_FILES),--validation_files='$(VALIDATION_FILES)') $(ARGS)

profile: $(READY)  ## What each stage of the input costs: make profile DATA='path/train-*'
	$(INDEX) > /dev/null
	@mkdir -p results
	@$(RUN) scripts/compare_throughput.py --stages --seconds=1 $(WORK) --json=results/stages.json --plot=results/stages.png $(ARGS)

tune: $(READY)  ## The fastest options for this machine and these files
	$(INDEX) > /dev/null
	@$(RUN) scripts/compare_throughput.py --tune --seconds=1 $(WORK) $(ARGS)

preview: $(READY)  ## What the model sees: a contact sheet in results/preview.png
	$(INDEX) > /dev/null
	@mkdir -p results
	@$(RUN) -m dali_tf_input preview $(WORK) --out=results/preview.png $(ARGS)

soak: $(DEVELOPED)  ## Epochs, evaluations and datasets by the hundred: that nothing grows
	@$(PYTEST) -m nightly tests/test_memory.py $(ARGS)

gpu-check: has-gpu $(READY)  ## On a machine with a GPU, in 15 minutes: check and measure it, in results/gpu.json
	$(INDEX) > /dev/null
	@mkdir -p results
	@$(RUN) scripts/gpu_check.py $(COMMON) --out=results/$(if $(REHEARSAL),rehearsal,gpu).json $(ARGS)

has-gpu:  # before 4 GB are downloaded for one
	@$(if $(REHEARSAL),,nvidia-smi -L > /dev/null 2>&1 || { echo "error: there is no NVIDIA GPU here (nvidia-smi shows none). On the CPU: make gpu-check ARGS=--rehearse" >&2; exit 1; })

doctor: $(INSTALLED)  ## What of this installation works; with DATA= also files and indexes
	@$(RUN) -m dali_tf_input doctor $(if $(DATA),$(COMMON)) $(ARGS)

test: $(DEVELOPED)  ## Run the tests (also: make test-slow, test-nightly, test-gpu)
	@$(PYTEST) -n 2 $(ARGS)

test-slow: $(DEVELOPED)  ## Run the tests that take long
	@$(PYTEST) -n 2 -m 'slow and not nightly and not gpu' $(ARGS)

test-nightly: $(NIGHTLY)  ## Run all tests, with their whole tables
	@NIGHTLY=1 $(PYTEST) -n 4 -m 'not gpu and not wheel' $(ARGS)

test-gpu: $(DEVELOPED)  ## Run the tests that need an NVIDIA GPU
	@$(RUN) -m pytest -m gpu $(ARGS)

check: $(DEVELOPED)  ## Check style, types, spelling and the layers of imports; changes nothing
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m codespell_lib dali_tf_input scripts tests docs skills llms.txt *.md Makefile
	$(RUN) -m proselint --config .proselintrc.json check docs/*.md skills/*/*.md llms.txt *.md
	$(or $(PYTHON_SITE),$(VENV))/bin/shellcheck .ci/run scripts/*.sh
	$(RUN) -m pytest -q -m 'not gpu' tests/test_layers.py

format: $(DEVELOPED)  ## Format the code; the only target that edits
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

docs: $(DEVELOPED)  ## Build the documentation in results/site
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs --quiet build --strict --site-dir results/site

wheel: $(DEVELOPED)  ## Build the wheel and the source distribution in dist/, check them, use the wheel as pip's users do
	@rm -rf dist
	@$(RUN) -m build --quiet --outdir dist
	@$(RUN) -m twine check --strict dist/*
	@$(RUN) -m auditwheel show dist/*.whl
	@$(PYTEST) -n 2 -m wheel tests/test_wheel.py

clean:  ## Remove everything that was made: .venv, data/sample, results, caches
	rm -rf .venv data/sample results build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(if $(PYTHON_SITE),,$(INSTALLED)): $(SETUP)
	@PYTHON='$(PYTHON)' scripts/install.sh '$(VENV)' $(if $(GPU),gpu)
	@touch $@

$(DEVELOPED): $(SETUP)
	@PYTHON='$(PYTHON)' scripts/install.sh '$(VENV)' dev $(if $(GPU),gpu)
	@touch $@ $(INSTALLED)

$(NIGHTLY): $(SETUP)
	@PYTHON='$(PYTHON)' scripts/install.sh '$(VENV)' dev nightly $(if $(GPU),gpu)
	@touch $@ $(DEVELOPED) $(INSTALLED)

$(SAMPLE).complete: scripts/make_sample_tfrecords.py dali_tf_input/cli/convert/writer.py | $(INSTALLED)
	@$(RUN) scripts/make_sample_tfrecords.py --overwrite $(SAMPLE)
	@$(RUN) -m dali_tf_input index --verify=schema '$(SAMPLE)/*-of-*'
	@touch $@
