# Two commands for a newcomer: `make demo` and `make test`. Each does all its own set-up, and nothing twice.
#
#   make env [STACK=modern|stock|newest]   the environment alone: .venv, .venv-stock or .venv-newest
#   make demo [DEMO=...]            trains a small dMoE on real text, 2 processes on the CPU
#   make test                       tests marked quick: something of every part, in minutes
#   make test-all [TESTS=...]       the whole suite, or the part of it that TESTS names
#   make test-rest                  what `make test` leaves out
#                                   (WORKERS=4: tests of four files at once; many start processes of their own)
#   make lint                       ruff and mypy
#   make docs                       the documentation site, in build/site; a broken link is an error
#   make chaos                      1,000 kills of the checkpoint engine, and 24 of the demo's run: an hour
#   make chaos-ceph                 the same on Ceph RGW, started here (Debian: scripts/ceph_rgw.sh says what it needs), or
#                                   on any S3: make chaos-ceph AWS_ENDPOINT_URL=http://... FOLDER=s3://bucket/run
#   make check-exports  exported models, read by the newest transformers in an environment of its own (FOLDERS=... too)
#   make papers                     lists the papers' claims that can be rerun, one command each
#   make verify                     trains on meshes of 1 to 8 processes, and compares with one
STACK ?= modern
VENV := $(if $(filter modern,$(STACK)),.venv,.venv-$(STACK))
BIN := $(VENV)/bin
# xdist would begin with the files of many tests, and end with one long test on one core
XDIST = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TESTS ?= tests
DEMO ?=
WORKERS ?= 2
export FOLDER ?= s3://chaos/run

# One thread a process and no hub: what a small CPU run wants, and what makes it repeatable.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
# Where it is set (in images of Python, often), every process compiles all that LLM Foundry imports: 25 s in place of 8.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env demo test test-all test-rest lint docs check-exports papers verify chaos chaos-ceph clean

env:
	@scripts/make_env.sh $(VENV) $(STACK)

data/demo/facts.json: foundry_moe/demo.py | env
	$(BIN)/python -m foundry_moe.demo data/demo

demo: env data/demo/facts.json
	$(BIN)/composer -n 2 foundry_moe/train.py yamls/demo/cpu.yaml $(DEMO)

test: env
	$(BIN)/python -m pytest $(XDIST) -m quick $(TESTS)

test-all: env
	$(BIN)/python -m pytest $(XDIST) $(TESTS)

test-rest: env
	$(BIN)/python -m pytest $(XDIST) -m "not quick" $(TESTS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in build/site: open build/site/index.html"

check-exports: env
	scripts/check_exports.sh $(VENV) $(FOLDERS)

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
	rm -rf runs data .venv .venv-stock build *.egg-info
