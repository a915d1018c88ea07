# Two commands on a bare machine (python3, pip, make): `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test unit lint format bench claims mutants dashboards-render lock clean

help:
	@echo "make demo    does cache-aware routing pay? 4 simulated engines, report in results/demo/report.html"
	@echo "make test    lint, types, import direction and every test, real engines and routers included"
	@echo "make unit    the tests that need no real engine, router, browser or Prometheus"
	@echo "make lint    static checks only"
	@echo "make bench   the quick benchmarks (ratios against a named baseline in the same run)"
	@echo "make mutants  changes the pure modules line by line: do their tests notice? MODULES='alerts/burn_rate.py …' for some"
	@echo "make claims  published claims about cache-aware routing, tried on the simulated fleet"
	@echo "make dashboards-render  the dashboards over a real run, drawn by Grafana's components (npm) into results/dashboards/"
	@echo "make lock    rewrite the lock files from pyproject.toml: everything, the core alone (exporter, rules), and with the tools"

# Exit code 3 is a verdict, too: the machine was too busy to measure on, and the last lines say so.
demo: .venv/runtime
	$(BIN)/prefixwatch bench shared-prefix --policy round_robin,cache_aware --workers 4 --out results/demo || test $$? = 3

test: .venv/dev
	scripts/install-test-tools
	$(MAKE) --no-print-directory lint
	scripts/install-test-engine
	scripts/install-test-peers
	scripts/run-tests

unit: .venv/dev
	$(BIN)/pytest -m "not vllm and not browser and not prometheus and not peers and not render"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/lint-prose

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

claims: .venv/dev
	$(BIN)/pytest benchmarks/claims
	$(BIN)/python -m benchmarks.claims

mutants: .venv/dev
	$(BIN)/pip install --quiet cosmic-ray==8.7.0
	$(BIN)/python scripts/mutants $(MODULES)

bench: .venv/dev
	$(BIN)/python -m benchmarks

dashboards-render: .venv/dev
	scripts/install-test-tools
	scripts/install-render
	RENDER=1 $(BIN)/pytest -m render
	$(BIN)/python -m tests.stack.dashboard_pictures --out results/dashboards

.venv/runtime: requirements.lock pyproject.toml
	scripts/make-venv requirements.lock
	@touch $@

.venv/dev: requirements-dev.lock pyproject.toml
	scripts/make-venv requirements-dev.lock
	@touch $@ .venv/runtime

COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --no-header --no-annotate --generate-hashes --no-emit-index-url --upgrade -q
lock: .venv/dev
	$(BIN)/pip install --quiet uv
	$(COMPILE) pyproject.toml --extra bench --extra fast -o requirements.lock
	$(COMPILE) pyproject.toml -c requirements.lock -o requirements-core.lock
	$(COMPILE) pyproject.toml --extra all --group dev -c requirements.lock -o requirements-dev.lock
	$(BIN)/uv pip compile --python-platform linux --python-version 3.11 tests/peers/requirements.in \
	  --overrides tests/peers/overrides.in \
	  --no-header --no-annotate --generate-hashes --no-emit-index-url --upgrade -q -o tests/peers/requirements.lock

clean:
	rm -rf .venv .peers results tests/dashboards/render/node_modules tests/dashboards/render/dist
