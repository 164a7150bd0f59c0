# Everything a newcomer needs: `make serve`, `make test`. Both set up .venv by themselves, once.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= embedded
PREFILL ?= 1
DECODE ?= 1
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHEELS := $(VENV)/wheels
SOURCES := baton benchmarks charts cluster core decode device docs engine examples kernels kvtransfer models net parallel prefill setup.py sim tests tools

.PHONY: help serve local chat test test-all lint docs format compiled config-page chart-schema gpu gpu-packages setup clean
help:
	@echo "make serve [MODEL=embedded] [PREFILL=1] [DECODE=1] [PORT=8000] [ARGS='...']   start a cluster on this machine"
	@echo "make local                                             the same in one process, without Ray"
	@echo "make chat                                              talk to it"
	@echo "make test (minutes) | test-all (what CI runs) | lint | docs | format | compiled | clean"
	@echo "make gpu-packages, then make gpu [OUT=build/gpu]        on a machine with a GPU: everything that only a GPU can show"

setup: $(READY)

# $(call phase,WHAT,COMMAND): one line with the seconds that COMMAND took, and whatever it had to say.
phase = @printf '==> %-22s' '$(1)'; from=$$(date +%s); said=$$( { $(2); } 2>&1 ); code=$$?; \
	echo "$$(($$(date +%s) - from)) s"; [ -z "$$said" ] || echo "$$said"; exit $$code

# uv installs in a fifth of pip's time. pip does it where uv cannot be had, or cannot reach what pip is told to use.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
install = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP) install $(1)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(call phase,$(VENV),$(PYTHON) -m venv $(VENV))
	$(call phase,uv,$(PIP) install uv || echo 'uv cannot be installed here: pip takes its place')

# pip alone fetches torch, and uv gets the file: an index of uv's choice may offer a build for other devices, gigabytes larger.
# Without its cache, which would keep the half gigabyte of each clone for ever.
$(READY): pyproject.toml | $(BIN)/python
	$(call phase,torch,rm -rf $(WHEELS) && $(PIP) download --no-deps --dest $(WHEELS) "$(TORCH)" && $(call install,--no-cache --no-deps $(WHEELS)/torch-*.whl))
	$(call phase,Baton and the rest,$(call install,--editable ".[dev]"))
	$(call phase,NIXL,$(call install,--no-deps nixl-cu12==1.5.1) || echo 'NIXL cannot be installed here: its transport and the tests of it are left out')
	$(call phase,native kernels,$(BIN)/python -m kernels.cpu.build)
	@rm -rf $(WHEELS)
	@touch $(READY)

serve: $(READY)
	@exec $(BIN)/baton serve --model "$(MODEL)" --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) $(ARGS)

local: $(READY)
	@exec $(BIN)/baton serve --local --model "$(MODEL)" --port $(PORT) $(ARGS)

chat: $(READY)
	@exec $(BIN)/baton chat --base-url http://127.0.0.1:$(PORT) $(ARGS)

# Two workers, long tests first. `test` leaves out what is slow, but for one whole cluster; `test-all` is what CI runs.
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder
test: $(READY)
	$(PYTEST) -m "not slow or essential" $(ARGS)

test-all: $(READY)
	$(PYTEST) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports

docs:
	@$(PYTHON) docs/check.py

# The scheduler and the coarse simulation as machine code, in a folder of its own. -P keeps the sources of the working folder from being found first.
compiled: $(READY)
	rm -rf build/compiled
	BATON_COMPILE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/compiled .
	@echo "==> run anything on it: PYTHONPATH=build/compiled:. $(BIN)/python -P -m benchmarks.scheduler.decisions ..."

# For a machine that has a GPU, PyTorch, Triton and no network: no .venv there. `gpu-packages`, run where there is a network, fetches
# what else the GPU benchmarks import, for that machine's Python; the folder goes along with the checkout.
# What the image of such a machine mostly has is left out, since what travels with a checkout may be bounded: GPU_MORE='uvloop msgpack
# prometheus-client hypothesis pytest-timeout pytest-xdist' fetches it, too.
OUT ?= build/gpu
GPU_PYTHON ?= 3.12
GPU_PACKAGES := build/gpu-packages
gpu-packages:
	rm -rf $(GPU_PACKAGES)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --target $(GPU_PACKAGES) --only-binary=:all: \
		--python-version $(GPU_PYTHON) --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		"pydantic>=2.14,<3" "fastapi>=0.165" "uvicorn>=0.54" httptools python-multipart "llguidance>=1.9,<2" \
		opentelemetry-sdk opentelemetry-exporter-otlp-proto-http "pytest>=9.2" pytest-asyncio $(GPU_MORE)

gpu:
	PYTHONPATH=$(GPU_PACKAGES) $(PYTHON) -m benchmarks.gpu --out "$(OUT)" $(ARGS)

config-page: $(READY)
	$(BIN)/python -m baton.config_page

chart-schema: $(READY)
	$(BIN)/python charts/schema.py

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
