# `make test` and `make demo` need nothing but Python: they build .venv with the tested set of packages first.
#   PYTHON=python3.12   the interpreter that builds it
#   VENV=               no environment: PYTHON as it stands, with its own torch, triton and transformers
PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
py := $(PYTHON)
ready :=
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
else
py := $(VENV)/bin/python
ready := $(VENV)/.ready
endif

TRITON := installed 3.6.0
# a process for each core, or one on a GPU
PARALLEL := --numprocesses auto --dist worksteal
OLDEST := $(addprefix test/,benchmark/test_coverage.py::test_families patches/test_patches_vision.py \
	patches/test_patching_recognition.py patches/test_patches_experts.py patches/test_patches_every_expert.py patches/test_patches_experts_report.py \
	patches/test_patches_routers.py patches/test_patches_balance.py patches/test_generation.py patches/test_generation_caches.py patches/test_generation_latents.py \
	patches/test_rewriting.py)
# compiled graphs; with the threads of generate_batch torch 2.11 for GPUs crashes where there is none
OLDEST_TORCH := $(addprefix test/,ops/test_compiled.py ops/test_glu_linear.py ops/test_ignored_tokens.py ops/test_router.py \
	patches/test_patches_unpacked.py patches/test_patches_qk_norm_rope.py patches/test_patches_add_rms_norm.py \
	patches/test_patches_own_experts.py)
# every kernel with its flags: the other tests of ops launch no further combination of them
NEWEST := $(addprefix test/,runtime/test_tiles.py ops/test_norms_and_rope.py ops/test_weight_gradient.py ops/test_router_logits.py \
	attention/test_attention_programs.py) \
	$(addprefix test/ops/test_ops.py::test_,zero_stride_upstream bitwise_repeatable)

.PHONY: demo test test-gpu test-oldest test-newest check compile-check mutants sanitize coverage tune
.PHONY: bench bench-losses bench-ops bench-attention bench-attention-grid
.PHONY: bench-generation bench-plan bench-post-training bench-training bench-trainers bench-small bench-sweeps bench-sharded
.PHONY: bench-long-context bench-curves

demo: $(ready)
	@$(py) examples/train.py

# make test, or some of the tests, make test ARGS="test/project/test_docs.py -k rope"
test: $(ready)
	$(py) -m pytest $(PARALLEL) $(ARGS)

test-gpu: $(ready)
	$(py) -m pytest -m gpu $(ARGS)

# the oldest transformers allowed, by the tests that see most of its classes; then the oldest torch and Triton, too
test-oldest: $(ready) .cache/transformers-5.17.0 .cache/torch-2.11.0
	PYTHONPATH=$(CURDIR)/.cache/transformers-5.17.0:$(PYTHONPATH) $(py) -m pytest $(PARALLEL) $(OLDEST)
	PYTHONPATH=$(CURDIR)/.cache/transformers-5.17.0:$(CURDIR)/.cache/torch-2.11.0:$(PYTHONPATH) $(py) -m pytest $(PARALLEL) $(OLDEST_TORCH)

# the newest Triton, by the tests that launch every kernel
test-newest: $(ready) .cache/triton-3.9.0
	PYTHONPATH=$(CURDIR)/.cache/triton-3.9.0:$(PYTHONPATH) $(py) -m pytest $(PARALLEL) $(NEWEST)

check: $(ready)
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy

# for all GPUs by the installed Triton and the oldest one allowed, or for some GPUs by other versions of Triton:
# make compile-check TRITON="installed 3.9.0" GPUS="sm_90 gfx942"; EVERY=3 compiles one in three variants of each kernel
compile-check: $(TRITON:%=compile-check-%)
	@echo "Compiled by Triton: $(TRITON)"

$(TRITON:%=compile-check-%): compile-check-%: $(ready) $(addprefix .cache/triton-,$(filter-out installed,$(TRITON)))
	PYTHONPATH=$(CURDIR)/.cache/triton-$*:$(PYTHONPATH) $(py) test/tools/compile_check.py $(GPUS) $(if $(EVERY),--every $(EVERY))
	PYTHONPATH=$(CURDIR)/.cache/triton-$*:$(PYTHONPATH) $(py) test/tools/inductor_kernels.py $(if $(EVERY),--every $(EVERY))

# make mutants, or some of them, make mutants ARGS="rope.py --workers 32"
mutants: $(ready)
	$(py) test/tools/mutants.py $(ARGS)

# on a GPU, with compute-sanitizer on the path: make sanitize, or make sanitize TOOLS="memcheck synccheck"
sanitize: $(ready)
	$(py) test/tools/sanitize.py $(TOOLS)

bench: $(ready)
	$(py) -m liger_like bench --out benchmark/results
	$(py) -m liger_like bench --report

bench-losses: $(ready)
	$(py) -m benchmark losses

bench-ops: $(ready)
	$(py) -m benchmark memory_bound

bench-attention: $(ready)
	$(py) -m benchmark attention

bench-attention-grid: $(ready)
	$(py) -m benchmark attention_grid

bench-post-training: $(ready)
	$(py) -m benchmark post_training

bench-generation: $(ready)
	$(py) -m benchmark generation

bench-training: $(ready)
	$(py) -m benchmark training

bench-trainers: $(ready)
	$(py) -m benchmark trainers

bench-small: $(ready)
	$(py) -m benchmark small

bench-sweeps: $(ready)
	$(py) -m benchmark sweeps

# on all GPUs of the machine
bench-sharded: $(ready)
	$(py) -m benchmark sharded

bench-long-context: $(ready)
	$(py) -m benchmark long_context

bench-curves: $(ready)
	$(py) -m benchmark curves

# with torch and transformers as they were when the steps were measured; needs no GPU
bench-plan: $(ready) .cache/transformers-5.17.0 .cache/torch-2.11.0
	PYTHONPATH=$(CURDIR)/.cache/transformers-5.17.0:$(CURDIR)/.cache/torch-2.11.0:$(PYTHONPATH) OMP_NUM_THREADS=1 \
		$(py) -m benchmark plan

coverage: $(ready)
	OMP_NUM_THREADS=1 $(py) -m benchmark coverage

# make tune, or make tune OP=rms_norm,rope
tune: $(ready)
	$(py) -m benchmark tune $(OP)

# pip prints errors alone
install = $(py) -m pip install -qq --disable-pip-version-check

.cache/triton-%: | $(ready)
	@echo "Installing triton $* into $@"
	@$(install) --no-deps --target $@ triton==$*

# with its Triton, whose interpreter does not know newer versions of numpy
.cache/torch-%: | $(ready)
	@echo "Installing torch $* into $@"
	@$(install) --target $@ torch==$* numpy==2.3.5

# with what newer ones have no use for
.cache/transformers-%: | $(ready)
	@echo "Installing transformers $* into $@"
	@$(install) --no-deps --target $@ transformers==$* huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Installing the tested packages into $(VENV): this takes minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(install) --constraint constraints.txt --editable '.[dev]'
	@touch $@
