# Two commands on a bare machine (python3, pip, make): `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test unit lint format bench claims dashboards-render lock clean

help:
	@echo "make demo    does cache-aware routing pay? 4 simulated engines, report in results/demo/report.html"
	@echo "make test    lint, types, import direction and every test, real engines and routers included"
	@echo "make unit    the tests that need no real engine, router, browser or Prometheus"
	@echo "make lint    static checks only"
	@echo "make bench   the quick benchmarks (ratios against a named baseline in the same run)"
	@echo "make claims  published claims about cache-aware routing, tried on the simulated fleet"
	@echo "make dashboards-render  the dashboards over a real run, drawn by Grafana's components (npm) into results/dashboards/"
	@echo "make lock    write the lock files anew from pyproject.toml"

# Exit code 3 is a verdict, too: the machine was too busy to measure on, and the last lines say so.
demo: .venv/runtime
	$(BIN)/prefixwatch bench shared-prefix --policy round_robin,cache_aware --workers 4 --out results/demo || test $$? = 3

test: .venv/dev
	scripts/install-test-tools
	$(MAKE) --no-print-directory lint
	scripts/install-test-engine
	scripts/install-test-peers
	$(BIN)/pytest

unit: .venv/dev
	$(BIN)/pytest -m "not vllm and not browser and not prometheus and not peers and not render"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

claims: .venv/dev
	$(BIN)/python -m benchmarks.claims

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

lock: .venv/dev
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 pyproject.toml --extra fast \
	  --no-header --no-annotate --generate-hashes --no-emit-index-url --upgrade -q -o requirements.lock
	$(BIN)/uv pip compile --universal --python-version 3.11 pyproject.toml --extra fast --extra kubernetes --group dev -c requirements.lock \
	  --no-header --no-annotate --generate-hashes --no-emit-index-url --upgrade -q -o requirements-dev.lock
	$(BIN)/uv pip compile --python-platform linux --python-version 3.11 tests/peers/requirements.in \
	  --overrides tests/peers/overrides.in \
	  --no-header --no-annotate --generate-hashes --no-emit-index-url --upgrade -q -o tests/peers/requirements.lock

clean:
	rm -rf .venv .peers results dashboards/render/node_modules dashboards/render/dist
