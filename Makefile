# SPDX-License-Identifier: Apache-2.0
# make serve and make test are the two commands; both set up what they need.

# the first that is Python 3.11 or newer, .venv's own aside where it is activated
PYTHON ?= $(shell PATH=$$(printf %s ":$$PATH:" | sed 's|:$(CURDIR)/.venv/bin:|:|g'); \
	for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test test-gpu two-gpus test-native fuzz lint docs conformance contract wheel airgap clean

help: ## say what each command does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1|/' \
		| while IFS='|' read -r command what; do printf '  %-18s %s\n' "$$command" "$$what"; done

define bootstrap
@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the path:" \
	"install one, or name it with PYTHON=/path/to/python" >&2; exit 1; }
@"$(PYTHON)" tools/bootstrap.py --for $1
endef

setup: ## make .venv whole: vLLM, tools, simulator, the series on a copy of vLLM
	$(call bootstrap,all)

# what they need and no more, since a GPU host may be without the network
.PHONY: setup-serve setup-test-gpu
setup-serve setup-test-gpu: setup-%:
	$(call bootstrap,$*)

serve: setup-serve ## serve a model with KV offload, on the GPU or the simulator (MODEL=, PORT=, ARGS=)
	@exec $(BIN)/python -m vllm_rocm_memory.serve $(ARGS)

demo: setup-serve ## show it in two minutes: complete, sleep, wake, offload, doctor (ARGS=)
	@exec $(BIN)/python -m vllm_rocm_memory.demo $(ARGS)

test: setup ## run every test that this machine can run (ARGS= goes to pytest)
	@$(BIN)/python -m pytest $(ARGS)

test-gpu: setup-test-gpu ## run every test that this machine's GPUs can run, and say why others are left out
	@$(BIN)/python tools/gpu_tests.py $(ARGS)

two-gpus: setup-test-gpu ## run what two GPUs are needed for, beside upstream, and log it (ARGS=)
	@$(BIN)/python tools/two_gpus.py $(ARGS)

test-native: setup ## C++ tests and the contract under the thread, address and UB sanitizers
	@$(BIN)/python tools/native_tests.py

SECONDS ?= 60
CLANG ?= clang++
fuzz: setup ## run the simulator's fuzzer (SECONDS=600, CLANG=/path/to/clang++)
	@$(BIN)/python tools/native_tests.py --fuzz $(SECONDS) --clang "$(CLANG)"

lint: setup ## check the whole tree: Python, C++, shell, Dockerfiles, CI files
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files

docs: setup ## build the documentation's site into build/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

conformance: setup ## run vLLM 0.33.0's own KV offload tests on the patched tree
	@$(BIN)/python tools/conformance.py $(ARGS)

contract: $(if $(HIP)$(LIBCUDA),,setup) ## check what HIP and CUDA's driver do, here or on a GPU (HIP=, CUDA=1, LIBCUDA=, ARGS=)
	@$(if $(CUDA)$(LIBCUDA),\
	find="$(or $(LIBCUDA),vllm_rocm_memory/_native/hipsim-cuda)" \
		names="libcuda.so.1 lib64/libcuda.so.1" program=on-cuda,\
	find="$(or $(HIP),vllm_rocm_memory/_native/hipsim)" \
		names="libamdhip64.so.7 lib/libamdhip64.so.7 lib/libamdhip64.so" program=on-hip); \
	lib="$$find"; for name in $$names; do test -f "$$lib" || lib="$$find/$$name"; done; \
	test -f "$$lib" || { echo "none of $$names in $$find" >&2; exit 1; }; \
	case " $$MAKEFLAGS" in *" -j"*) jobs= ;; *) jobs="-j$$(nproc || echo 1)" ;; esac; \
	$(MAKE) --no-print-directory $$jobs "build/contract/$$program" LIBRARY="$$lib" && \
	exec "build/contract/$$program" $(ARGS)

wheel: setup ## build the release wheels into dist/, one for each Python at hand
	@$(BIN)/python tools/release_wheel.py $(ARGS)

airgap: $(if $(ARGS),setup) ## bundle what a GPU host without network needs to run the GPU tests (ARGS=OUT)
	@test -n "$(ARGS)" || { echo "name the folder to fill: make airgap ARGS=bundle" >&2; exit 1; }
	@$(BIN)/python tools/airgap.py pack $(ARGS)

CONTRACT := tests/hipsim/contract
# the objects of a folder's sources
contract_objects = $(patsubst $(CONTRACT)/%.cpp,build/contract/objects/%.o,$(wildcard $(CONTRACT)/$1*.cpp))
build/contract/objects/%.o: $(CONTRACT)/%.cpp $(wildcard $(CONTRACT)/*.h $(CONTRACT)/*/*.h csrc/hipsim/bridge/*.h)
	@mkdir -p $(@D)
	@$(CXX) -std=c++17 -O1 -g -Icsrc/hipsim -I$(CONTRACT) -c $< -o $@

# linked each time, because the library may be another one
.PHONY: build/contract/on-hip build/contract/on-cuda
build/contract/on-hip: $(call contract_objects,harness/) $(call contract_objects,)
build/contract/on-cuda: $(call contract_objects,harness/) $(call contract_objects,cuda/)
build/contract/on-hip build/contract/on-cuda:
	@$(CXX) $^ "$(LIBRARY)" -Wl,-rpath,"$(dir $(abspath $(LIBRARY)))" -o $@ \
		-Wl,--unresolved-symbols=ignore-all,-z,lazy,--export-dynamic \
		-pthread -ldl

clean: ## remove .venv, caches and everything that was built
	rm -rf .venv .cache build dist *.egg-info vllm_rocm_memory/_native \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
