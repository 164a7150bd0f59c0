# Everything a newcomer needs: `make serve`, `make test`. Both set up .venv by themselves, once.
PYTHON ?= python3
MODEL ?= embedded
SERVED = $(if $(MODELS),$(MODELS:%=--models "%"),--model "$(MODEL)")
PREFILL ?= 1
DECODE ?= 1
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHEELS := $(VENV)/wheels
SOURCES := .ci baton benchmarks charts cluster core decode device docs engine examples kernels kvtransfer locks models net parallel prefill setup.py sim tests tools

.PHONY: help serve local chat setup test test-all lint docs format lock lock-check audit sbom site site-serve site-version compiled config-page cli-page chart-schema gpu gpu-packages soak fuzz clean
# A target's line in `make help` is what follows its two hashes.
help: ## what can be made
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(READY) ## .venv with what locks/ pins, and the native kernels; other targets do it by themselves

# $(call phase,WHAT,COMMAND): one line with the seconds that COMMAND took, and whatever it had to say.
phase = @printf '==> %-22s' '$(1)'; from=$$(date +%s); said=$$( { $(2); } 2>&1 ); code=$$?; \
	echo "$$(($$(date +%s) - from)) s"; [ -z "$$said" ] || echo "$$said"; exit $$code

# uv installs in a fifth of pip's time. pip does it where uv cannot be had, or cannot reach what pip is told to use.
# Everything that comes from an index is named in locks/, with its hashes; locks are complete, so nothing is resolved here.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
install = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(1) || $(PIP) install --no-deps $(1)
locked = --require-hashes $(foreach name,$(1),--requirement locks/$(name).txt)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(call phase,$(VENV),$(PYTHON) -m venv $(VENV))
	$(call phase,uv,$(PIP) install $(call locked,uv) || echo 'uv cannot be installed here: pip takes its place')

# pip alone fetches torch, and uv gets the file: an index of uv's choice may offer a build for other devices, gigabytes larger. For the
# same reason pip is not told its hashes, by which it would choose: the file is compared with them afterwards.
# Without uv's cache, which would keep the half gigabyte of each clone for ever.
TORCH := $(shell sed -nE 's/^(torch==[^ ]+).*/\1/p' locks/torch.txt)
$(READY): pyproject.toml $(foreach name,torch dev triton cuda,locks/$(name).txt) | $(BIN)/python
	$(call phase,torch,rm -rf $(WHEELS) && $(PIP) download --no-deps --dest $(WHEELS) $(TORCH) && $(BIN)/python locks/verify.py locks/torch.txt $(WHEELS)/*)
	$(call phase,torch is installed,$(call install,--no-cache $(WHEELS)/*))
	$(call phase,what Baton needs,$(call install,$(call locked,dev triton)))
	$(call phase,CUDA for torch,! $(BIN)/python locks/torch_has_cuda.py || $(call install,$(call locked,cuda)))
	$(call phase,Baton,$(call install,--no-build-isolation --editable .))
	$(call phase,native kernels,$(BIN)/python -m kernels.cpu.build)
	$(call phase,bytecode,$(BIN)/python -m baton.bytecode)
	@rm -rf $(WHEELS)
	@touch $(READY)

serve: $(READY) ## a cluster on this machine: [MODEL=embedded, or MODELS='a=PATH b=PATH'] [PREFILL=1] [DECODE=1] [PORT=8000] [ARGS='...']
	@exec $(BIN)/baton serve $(SERVED) --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) $(ARGS)

local: $(READY) ## the same in one process, without Ray: [MODEL=embedded, or MODELS='a=PATH b=PATH'] [PORT=8000] [ARGS='...']
	@exec $(BIN)/baton serve --local $(SERVED) --port $(PORT) $(ARGS)

chat: $(READY) ## talk to it: [PORT=8000] [ARGS='...']
	@exec $(BIN)/baton chat --base-url http://127.0.0.1:$(PORT) $(ARGS)

# Two workers, long tests first. `test` leaves out what is slow, but for one whole cluster; `test-all` is what CI runs.
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder
test: $(READY) ## tests of minutes: [ARGS='tests/core -k name']
	$(PYTEST) -m "not slow or essential" $(ARGS)

test-all: $(READY) ## all tests, as CI runs them, a day's part of large matrices: [ARGS='...']
	$(PYTEST) $(ARGS)

lint: $(READY) ## ruff, pyright, import-linter, mypy for what is compiled, and the locks against pyproject.toml
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_compiled.py
	$(BIN)/python .ci/lock.py check
	$(BIN)/python -m pip check --disable-pip-version-check

docs: ## links and names in pages
	@$(PYTHON) docs/check.py

lock: $(READY) ## locks/ anew from pyproject.toml, npm's from package.json: [ARGS=--upgrade] takes the newest Python releases that fit
	$(BIN)/python .ci/lock.py make $(ARGS)
	for one in tests/clients/npm/*/; do npm install --prefix "$$one" --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund || exit 1; done

lock-check: $(READY) ## whether locks/ agrees with pyproject.toml; needs no network
	$(BIN)/python .ci/lock.py check

# In a folder of its own: what checks packages is not among those that it checks.
AUDIT := build/audit
$(AUDIT)/.ready: locks/audit.txt | $(BIN)/python
	@rm -rf $(AUDIT)
	$(call phase,pip-audit,$(call install,--target $(AUDIT) $(call locked,audit)))
	@touch $@

audit: $(AUDIT)/.ready ## known vulnerabilities in what locks/ pins: fails if there is one, or if nobody can be asked
	$(BIN)/python .ci/audit.py --tool $(AUDIT)

SBOM ?= build/baton.cdx.json
sbom: $(AUDIT)/.ready ## every Python release that an image may have, in CycloneDX: [SBOM=build/baton.cdx.json]
	@mkdir -p $(dir $(SBOM))
	cat $(foreach name,torch cuda triton image image-gpu,locks/$(name).txt) | PYTHONPATH=$(AUDIT) $(BIN)/python -m cyclonedx_py requirements \
		--pyproject pyproject.toml --mc-type application --output-reproducible --output-file "$(SBOM)" -

# In a folder of its own, and without Baton: pages of Python names are made from the sources, unimported.
SITE := build/site-tools
$(SITE)/.ready: locks/site.txt | $(BIN)/python
	@rm -rf $(SITE)
	$(call phase,mkdocs,$(call install,--target $(SITE) $(call locked,site)))
	@touch $@

WITH_SITE = PYTHONPATH="$(abspath $(SITE)):$(CURDIR)" PATH="$(abspath $(SITE))/bin:$$PATH" NO_MKDOCS_2_WARNING=1
site: $(SITE)/.ready ## the pages as a site that can be searched, into build/site: [ARGS='...']
	$(WITH_SITE) mkdocs build $(ARGS)

SITE_PORT ?= 8001
site-serve: $(SITE)/.ready ## look at that site, and at each change of a page: [SITE_PORT=8001]
	$(WITH_SITE) mkdocs serve --dev-addr 127.0.0.1:$(SITE_PORT) $(ARGS)

# `latest` is an alias of it, and where readers come to. Nothing is pushed.
site-version: $(SITE)/.ready ## commit the site as VERSION to the branch gh-pages: VERSION=0.2.0
	$(if $(VERSION),,$(error which version? make site-version VERSION=0.2.0))
	$(WITH_SITE) mike deploy --update-aliases "$(VERSION)" latest
	$(WITH_SITE) mike set-default latest

# The scheduler and the coarse simulation as machine code, in a folder of its own. -P keeps the sources of the working folder from being found first.
compiled: $(READY) ## the scheduler as machine code, into build/compiled
	rm -rf build/compiled
	BATON_COMPILE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/compiled .
	@echo "==> run anything on it: PYTHONPATH=build/compiled:. $(BIN)/python -P -m benchmarks.scheduler.decisions ..."

# For a machine that has a GPU, PyTorch, Triton and no network: no .venv there. `gpu-packages`, run where there is a network, fetches
# what else the GPU benchmarks import, for that machine's Python; the folder goes along with the checkout.
# What the image of such a machine mostly has is left out, since what travels with a checkout may be bounded: GPU_MORE=yes fetches it, too.
# GPU_RAY=yes adds Ray, without its parts that serve nobody here, and packs the folder into one file of a quarter of the size.
OUT ?= build/gpu
GPU_PYTHON ?= 3.12
GPU_PACKAGES := build/gpu-packages
gpu-packages: ## what `make gpu` needs beside PyTorch and Triton, into build/gpu-packages: [GPU_PYTHON=3.12] [GPU_MORE=yes] [GPU_RAY=yes]
	rm -rf $(GPU_PACKAGES) $(GPU_PACKAGES).tar.xz
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --target $(GPU_PACKAGES) --only-binary=:all: \
		--python-version $(GPU_PYTHON) --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
		--no-deps $(call locked,gpu-machine $(if $(GPU_MORE),gpu-machine-more) $(if $(GPU_RAY),gpu-machine-ray))
	$(if $(GPU_RAY),rm -r $(addprefix $(GPU_PACKAGES)/ray/,dashboard/client jars llm rllib train tune))
	$(if $(GPU_RAY),XZ_OPT=-9 tar -C $(GPU_PACKAGES) -cJf $(GPU_PACKAGES).tar.xz .)

gpu: ## everything that only a GPU can show, on a machine that has one: [OUT=build/gpu] [ARGS='...']
	[ -d $(GPU_PACKAGES) ] || [ ! -f $(GPU_PACKAGES).tar.xz ] || { mkdir -p $(GPU_PACKAGES) && tar -C $(GPU_PACKAGES) -xJf $(GPU_PACKAGES).tar.xz; }
	PYTHONPATH=$(GPU_PACKAGES) $(PYTHON) -m benchmarks.gpu --out "$(OUT)" $(ARGS)

config-page: $(READY) ## docs/configuration.md from the code
	$(BIN)/python -m baton.config_page

cli-page: $(READY) ## docs/cli.md from the code
	$(BIN)/python -m baton.cli_page

chart-schema: $(READY) ## the chart's values.schema.json from the code
	$(BIN)/python charts/schema.py

format: $(READY) ## ruff's fixes and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## remove .venv and what builds leave
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis

MINUTES ?= 60
soak: $(READY) ## every kind of request with a fault every few seconds: [MINUTES=60]; the report is written to build/soak
	@mkdir -p build/soak
	$(BIN)/python -m benchmarks.soak.soak --minutes $(MINUTES) --json build/soak/soak.json $(ARGS)

SECONDS ?= 60
fuzz: $(READY) ## search for inputs that a parser does not expect: [TARGET=http] [SECONDS=60]; names targets without one
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(call install,$(call locked,fuzz))
	$(BIN)/python -m tests.fuzz $(TARGET) --seconds $(SECONDS)
