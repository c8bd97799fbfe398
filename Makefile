# Every target makes its own virtual environment first; nothing needs to be installed by hand
# but Python 3.11 or 3.12 and make.

SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c "$(SUPPORTED)" 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# More than cores: much of a test's time is waiting, for windows, leases, links and services.
JOBS ?= 4
# Hundreds of processes of the tests import the same modules.
unexport PYTHONDONTWRITEBYTECODE
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: install demo test long export-environments check format bench soak gpu-test site readability wheelhouse offline-install clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Steptune needs Python 3.11 or 3.12; set PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	sed 's/^torch==.*/$(TORCH)/' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt $(TORCH) --editable ".[torch,examples,transformers,postgresql,oidc,parquet,ray]" --group dev
	@touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/steptune tune examples/slow_storage.py:SlowStorage --only data_loading --trials 3 --budget 4m \
		--database sqlite:///steptune.db --output demo-results

test: install .venv-kernels/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not long and not soak and not gpu" tests; status=$$?; \
	.venv-kernels/bin/python -m pytest -n $(JOBS) $(KERNEL_TESTS) && exit $$status

long: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "long and not soak and not gpu" tests

# Kernels are interpreted on a CPU. Their Triton is in an environment of its own, so that no other test compiles by it.
KERNEL_TESTS := tests/contracts/test_kernels.py $(addprefix tests/unit/,$(addsuffix .py,test_window_attention test_swin_models \
	test_simota_kernel test_loss_kernels test_int8_blocks test_deep_gradient_kernel test_multi_tensor_kernels test_fused_optimizers test_fused_optimizers_guard))
.venv-kernels/.installed: pyproject.toml constraints.txt $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip .venv-kernels
	$(BIN)/python -c '$(PURELIB)' >"$$(.venv-kernels/bin/python -c '$(PURELIB)')/steptune-shared.pth"
	$(BIN)/python -m pip --python .venv-kernels/bin/python install --quiet --no-deps --constraint constraints.txt triton
	@touch $@

# The libraries that exports are for, in two environments of their own; torch and the rest are those of $(VENV).
export-environments: .venv-exports-accelerate/.installed .venv-exports-deepspeed/.installed

.venv-exports-%/.installed: exports-%.txt $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip .venv-exports-$*
	$(BIN)/python -c '$(PURELIB)' >"$$(.venv-exports-$*/bin/python -c '$(PURELIB)')/steptune-shared.pth"
	DS_BUILD_OPS=0 .venv-exports-$*/bin/python -m pip install --quiet --no-deps --requirement exports-$*.txt
	@touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/docstrings.py

# The documentation as a site with search, in build/site. Its generator has an environment of its own.
SITE_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
.venv-site/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Steptune needs Python 3.11 or 3.12; set PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -c '$(SITE_NEEDS)' | .venv-site/bin/python -m pip install --quiet --requirement /dev/stdin
	@touch $@

site: .venv-site/.installed
	.venv-site/bin/python docs/build_site.py

# The school years that the README and the tutorial ask of a reader, by a library in an environment of its own.
PROSE_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["prose"], sep="\n")
.venv-prose/.installed: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m venv .venv-prose
	.venv-prose/bin/python -c '$(PROSE_NEEDS)' | .venv-prose/bin/python -m pip install --quiet --requirement /dev/stdin
	@touch $@

readability: .venv-prose/.installed
	.venv-prose/bin/python docs/readability.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/statistics
	$(BIN)/python benchmarks/repeatability.py

# IMAGES has what building them needs here, as --interpreter /opt/python3.12 (root, debootstrap and iproute2 in any case).
IMAGES ?=
soak: install
	$(BIN)/python -m pytest -m soak -p no:randomly --timeout 5400 tests
	PYTHONPATH=src $(BIN)/python tests/support/chaos.py --minutes 10 --output benchmarks/results/chaos.json
	PYTHONPATH=src $(BIN)/python benchmarks/shaped_links.py --repeats 5 --output benchmarks/results/shaped_links.json
	$(BIN)/python tests/images/prove.py $(IMAGES) --output benchmarks/results/images.json

# In the environment of `make install`, else in the interpreter that `make offline-install` filled.
# Side by side, but for those that compare with the device's clock, and those of several ranks, which share GPUs where there
# are fewer than four. A plugin for benchmarks, where a host has it, warns of running side by side, and warnings are errors.
GPU_JOBS ?= 6
ALONE := tests/gpu/test_device_truth.py
RANKS := tests/gpu/test_ranks_on_device.py tests/gpu/test_meshes_on_device.py
GPU_PYTHON = $(or $(wildcard $(BIN)/python),python3)
GPU_PYTEST = PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu -p no:benchmark
PARTS = $(shell $(GPU_PYTHON) -c "import torch; n = torch.cuda.device_count(); print(n * -(-4 // n) if 0 < n < 4 else '')")
gpu-test:
	$(GPU_PYTEST) -n $(GPU_JOBS) --dist loadfile $(addprefix --ignore ,$(ALONE) $(RANKS)) tests/gpu; status=$$?; \
	$(GPU_PYTEST) $(ALONE) || status=$$?; \
	$(addprefix STEPTUNE_EMULATED_DEVICES=,$(PARTS)) $(GPU_PYTEST) $(RANKS) && exit $$status

# Wheels for a host without network that has PyTorch for Python 3.12 already.
PLATFORMS := $(foreach tag,2_28 2_27 2_17,--platform manylinux_$(tag)_x86_64) --platform manylinux2014_x86_64
wheelhouse: install
	rm -rf .wheelhouse
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(PLATFORMS) --constraint constraints.txt --dest .wheelhouse --requirement wheelhouse.txt

# On that host, into its own interpreter: never touches its torch, triton or numpy.
offline-install:
	python3 -m pip install --quiet --no-index --find-links .wheelhouse --no-deps --upgrade --requirement wheelhouse.txt

clean:
	rm -rf $(VENV) .venv-exports-* .venv-kernels .venv-prose .venv-site build dist *.egg-info
