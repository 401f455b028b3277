# Every command of the project. `make help` lists them. Nothing is installed outside $(VENV) and build/, except that a
# missing system package is installed by apt-get when make runs as root, and named otherwise.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

BIN := $(VENV)/bin
C_FILES := $(wildcard csrc/*.c csrc/*.h csrc/*.cpp kernels/*.h kernels/*/*.c kernels/*/*.h)
EMU_FILES := $(wildcard emu/*.c emu/*.h emu/*.def)
FORMATTED := $(C_FILES) $(filter-out %.def,$(EMU_FILES))
ASAN_CC := clang-22
ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -shared-libsan -fno-omit-frame-pointer -g

.DEFAULT_GOAL := help
.PHONY: help build test test-gfx950 selftest demo bench report asan lint format wheel clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) JOBS=$(JOBS) (of tests) ARGS= (passed on to pytest, the demo or the benchmark)"

build: $(VENV)/.built ## set up the virtual environment and build in place

test: build $(if $(filter gfx950-emu,$(MXFP8_BACKEND)),build/emu/libmxfp8_emu.so) ## run the test-suite (ARGS="--backend cpu-avx2 -k ragged")
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-gfx950: build build/emu/libmxfp8_emu.so ## run the gfx950 kernels on the emulator, and its own tests (needs llvm-22, no GPU)
	@command -v llvm-mc-22 >/dev/null || $(call apt_install,llvm-22)
	$(BIN)/python -m pytest tests/emu tests/gfx950 $(ARGS)

selftest: build $(if $(filter gfx950-emu,$(MXFP8_BACKEND)),build/emu/libmxfp8_emu.so) ## check this machine's device against a reference (ARGS="--device cpu --no-benchmark")
	MXFP8_EMU_LIBRARY=$(CURDIR)/build/emu/libmxfp8_emu.so MXFP8_EMU_OOB=zero $(BIN)/python -m mxfp8_moe.selftest $(ARGS)

demo: build ## train a small mixture-of-experts language model with and without MXFP8 (ARGS="--steps 50")
	$(BIN)/python -m examples.demo $(ARGS)

bench: build ## compare speed and memory with torch, interleaved in one process (ARGS="--help")
	$(BIN)/python -m benchmarks.bench $(ARGS)

report: build build/emu/libmxfp8_emu.so ## what can be said of the gfx950 kernels' speed without the chip (ARGS="--no-counts")
	$(BIN)/python -m benchmarks.gfx950_report $(ARGS)

asan: build ## run the test-suite on a build with AddressSanitizer and UndefinedBehaviorSanitizer
	@command -v $(ASAN_CC) >/dev/null || $(call apt_install,$(ASAN_CC) libclang-rt-22-dev g++)
	rm -rf build/asan
	CC=$(ASAN_CC) CFLAGS="$(ASAN_FLAGS)" $(BIN)/python setup.py -q build_ext --build-temp build/asan-temp --build-lib build/asan
	cp mxfp8_moe/*.py build/asan/mxfp8_moe/
	LD_PRELOAD="$$($(ASAN_CC) -print-file-name=libclang_rt.asan-$$(uname -m).so)" UBSAN_OPTIONS=log_path=$(CURDIR)/build/asan/report \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$(CURDIR)/build/asan/report \
	  PYTHONPATH=$(CURDIR)/build/asan $(BIN)/pytest $(ARGS) || { cat build/asan/report.* 2>/dev/null; exit 1; }

lint: build ## ruff, mypy --strict, clang-format, clang-tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/python setup.py -q tidy

format: build ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

wheel: build ## build a wheel into dist/
	$(BIN)/pip wheel -q --no-deps -w dist .

clean: ## remove everything that make made
	rm -rf $(VENV) build dist *.egg-info mxfp8_moe/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# $(call apt_install,packages): for use after `||` in a recipe.
apt_install = { test "$$(id -u)" = 0 || { echo "missing: $(1). Install it with: sudo apt-get install $(1)" >&2; exit 1; }; \
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); }

# The gfx950 emulator, also under the names of the library that it stands in for.
build/emu/libmxfp8_emu.so: $(EMU_FILES) | $(VENV)/.built
	@mkdir -p $(@D)
	$(BIN)/python -m ziglang cc -std=gnu23 -O3 -march=native -fPIC -shared -fvisibility=hidden -ffp-contract=off \
	  -fno-strict-aliasing -fno-sanitize=undefined -Wall -Wextra -Werror -Wno-psabi $(EMU_CFLAGS) \
	  -Wl,-soname,libamdhip64.so.7 -o $@ $(filter %.c,$(EMU_FILES)) -lm -lpthread
	ln -sf $(@F) $(@D)/libamdhip64.so.7
	ln -sf $(@F) $(@D)/libamdhip64.so

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed, found %d.%d" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt_install,python3-venv)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	@touch $@

$(VENV)/.built: $(VENV)/.made setup.py pyproject.toml $(C_FILES)
	$(BIN)/pip install -q -e ".[test,bench,lint]"
	@touch $@
