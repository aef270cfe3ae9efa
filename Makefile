# Start with `make demo` and `make test`. Each target creates what it needs, once.
#
#   make env [STACK=modern|stock|newest]   the environment: .venv, .venv-stock or .venv-newest
#   make demo [DEMO=...]            trains a small dMoE on real text, 2 processes on the CPU
#   make test                       tests marked quick: some of every part, in minutes
#   make test-all [TESTS=...]       the whole suite, or the part in TESTS
#   make test-rest                  the tests that `make test` does not run
#                                   (WORKERS=4: four files at once; many tests start processes)
#   make lint                       ruff and mypy
#   make docs                       the documentation site, in build/site; a broken link is an error
#   make dist                       sdist and wheel in build/dist, checked by twine, installed and run
#   make chaos                      1,000 kills of the checkpoint engine, and 24 of the demo's run: an hour
#   make chaos-ceph                 the same on a local Ceph RGW (Debian packages: see scripts/ceph_rgw.sh) or on any
#                                   S3: make chaos-ceph AWS_ENDPOINT_URL=http://... FOLDER=s3://bucket/run
#   make check-exports [FOLDERS=...]   loads exported models with the newest transformers in a separate environment
#   make serve-exports [FOLDERS=...]  compares vLLM's numbers for exported models, on a CPU (6 GB; 12 minutes; not in CI)
#   make test-transformers          foundry_moe/integrations on the base install with transformers 5
#   make peft-env                   peft 0.18 and the newest beside transformers 5, for tests of adapters; skipped without
#   make test-peft                  these tests
#   make mutants MODULE=foundry_moe/ops/mlp.py [MUTANTS="--sample 20"]   edits of a module that its tests do not notice
#   make papers                     lists the claims of papers that can be measured again, with their commands
#   make verify                     compares training on meshes of 1 to 8 processes with one process
STACK ?= modern
VENV := $(if $(filter modern,$(STACK)),.venv,.venv-$(STACK))
BIN := $(VENV)/bin
# without this xdist starts with the files of many tests and ends with one long test on one core
XDIST = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TESTS ?= tests
DEMO ?=
WORKERS ?= 2
export FOLDER ?= s3://chaos/run

# One thread per process and no hub, so that CPU runs are fast and repeatable.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
# If set (often in Python images), every process compiles the modules that LLM Foundry imports: 25 s instead of 8.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env demo test test-all test-rest lint docs dist check-exports serve-exports test-transformers peft-env test-peft mutants papers verify chaos chaos-ceph clean

env:
	@scripts/make_env.sh $(VENV) $(STACK)

data/demo/facts.json: examples/demo_data.py | env
	$(BIN)/python examples/demo_data.py data/demo

demo: env data/demo/facts.json
	$(BIN)/foundry-moe train yamls/demo/cpu.yaml -n 2 $(DEMO)

test: env
	$(BIN)/python -m pytest $(XDIST) -m "quick and not npm" $(TESTS)

test-all: env
	$(BIN)/python -m pytest $(XDIST) $(TESTS)

test-rest: env
	$(BIN)/python -m pytest $(XDIST) -m "not quick or npm" $(TESTS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in build/site; its search needs a server: python -m http.server --directory build/site"

dist: env
	scripts/check_wheel.sh $(VENV)

check-exports: env
	scripts/check_exports.sh $(VENV) $(FOLDERS)

serve-exports: env
	scripts/serve_exports.sh $(VENV) $(FOLDERS)

test-transformers: env
	scripts/make_transformers_env.sh $(VENV) .venv-transformers
	.venv-transformers/bin/python -m pytest -n $(WORKERS) tests/integrations $(filter-out tests,$(TESTS))

peft-env: env
	scripts/make_transformers_env.sh $(VENV) .venv-transformers
	$(BIN)/uv pip install --quiet --python .venv-transformers/bin/python --upgrade-package peft peft "numpy<2.4"
	$(BIN)/uv pip install --quiet --no-deps --target .venv-transformers/peft-0.18 "peft==0.18.*"

test-peft: peft-env
	$(BIN)/python -m pytest -k peft tests/commands/test_export_adapter.py tests/models/test_adapters.py

mutants: env
	nice $(BIN)/python scripts/mutants.py $(MODULE) $(MUTANTS)

papers: env
	@$(BIN)/python -m benchmarks.papers

verify: env
	$(BIN)/foundry-moe verify

chaos: env data/demo/facts.json
	$(BIN)/python -m tests.chaos.engine_kills --kills 1000
	$(BIN)/python -m tests.chaos.run_kills --data data/demo --kills 24
	$(BIN)/python -m tests.chaos.fuzz_yamls --cases 10000

chaos-ceph: env data/demo/facts.json
	scripts/chaos_ceph.sh $(BIN)/python data/demo

clean:
	rm -rf runs data .venv .venv-stock .venv-newest .venv-transformers build *.egg-info
