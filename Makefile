# make: what there is to run, in .venv, made here from the locks in requirements/ (Linux x86-64, CPU).
# test-gpu, build-gpu and sanitize run in an environment of your own: requirements.txt

PYTHON ?= python3
# Where torch's CPU build is fetched when the sources that pip is configured with have none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

# Nothing here needs a model hub.
export HF_HUB_OFFLINE ?= 1

bin := .venv/bin
install := $(bin)/python -m pip --disable-pip-version-check install -qq --no-deps

# Stamps that say "this lock is installed". Their names carry a digest of what was installed, so an
# edited lock (or kernel) is installed again and an unchanged one costs nothing.
stamp = .venv/.$(1)-$(shell cat requirements/$(1).txt setup.py csrc/cpu/* | sha256sum | cut -c 1-16)
cpu := $(call stamp,cpu)
test := $(call stamp,test)

.PHONY: help demo test test-slow compatibility test-gpu build-gpu sanitize bench site sbom style clean
.DELETE_ON_ERROR:

help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(cpu) ## install what a CPU needs into .venv, then ask a small real model ten questions, with and without reuse
	$(bin)/vllm-blend demo $(ARGS)

test: $(test) ## the tests that need no GPU, but for the slow ones
	$(bin)/python -m pytest -n 2 --dist loadfile -m "not gpu and not slow" $(ARGS)

test-slow: $(test) ## the slow ones: servers, more model families, kernels in Triton's interpreter
	$(bin)/python -m pytest -n 2 --dist loadfile -m "slow and not gpu" $(ARGS)

compatibility: $(test) ## docs/compatibility.md, by the tests that say what they cover
	$(bin)/python -m pytest tests -q --collect-only -m covers --covered docs/results/compatibility.csv >/dev/null
	$(bin)/python -m pytest tests -n 2 --dist loadfile -m "covers and not gpu" --covered docs/results/compatibility.csv
	$(bin)/python docs/make_compatibility.py

test-gpu: ## the tests that need a GPU, with $(PYTHON): an environment made from requirements.txt
	$(PYTHON) -m pytest -m gpu $(ARGS)

build-gpu: ## the CUDA C++ ops, in place, with $(PYTHON), whose torch is a CUDA build, and nvcc
	VLLM_BLEND_BUILD_CUDA=1 $(PYTHON) setup.py build_ext --inplace

sanitize: ## compute-sanitizer over every GPU kernel, with $(PYTHON)
	for tool in memcheck racecheck; do \
	  compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 \
	    $(PYTHON) tests/ops/sanitize.py || exit 1; \
	done

bench: $(cpu) ## time to first token, full prefill against blended, on the CPU
	$(bin)/python benchmarks/bench_ttft.py $(ARGS)

site: $(test) ## the docs as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

sbom: $(test) ## what a CPU installation is made of, in build/sbom (CycloneDX), and licences in requirements/
	@mkdir -p build/sbom
	$(bin)/cyclonedx-py requirements requirements/cpu.txt --of JSON --output-reproducible \
	  -o build/sbom/cpu.cdx.json
	$(bin)/pip-licenses --from=mixed --with-system --format=csv --output-file requirements/licences.csv \
	  --packages $$(grep -o '^[a-zA-Z0-9._-]*==' requirements/cpu.txt | tr -d =)

style: $(test) ## ruff, mypy, and clang-format where there is C++
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	@find csrc -name '*.cu*' -o -name '*.cpp' -o -name '*.h' 2>/dev/null \
	  | xargs -r -t $(bin)/clang-format --dry-run -Werror

clean: ## remove .venv and every cache made here (the model built for the demo stays in ~/.cache)
	rm -rf .venv build dist vllm_blend/*.abi3.so *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(cpu): lock := requirements/cpu.txt
$(test): lock := requirements/test.txt
$(cpu) $(test): .venv/.made
	@echo "Installing $$(grep -c == $(lock)) packages from $(lock) into .venv (minutes the first time)"
	@torch=$$(grep -o '^torch==[^ ]*' $(lock)); \
	  $(install) $$torch 2>/dev/null \
	  || { echo "pip's own sources have no $$torch: fetching it from $(TORCH_INDEX)"; \
	       $(install) --index-url $(TORCH_INDEX) $$torch; }
	@$(install) -r $(lock)
	@$(install) --no-build-isolation -e .
	@touch $@
	@echo "Installed."

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	  || { echo "Needs Python 3.11 to 3.14 (vLLM's range): make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "This Python cannot make environments: apt-get install python3-venv libnuma1"; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
	  || { echo "vLLM on a CPU needs a system library: apt-get install python3-venv libnuma1"; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@
