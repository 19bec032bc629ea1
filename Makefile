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

.PHONY: demo test check compile-check mutants sanitize bench bench-losses bench-ops bench-attention bench-training bench-curves coverage tune

demo: $(ready)
	$(py) examples/train.py

test: $(ready)
	$(py) -m pytest

check: $(ready)
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy

# both ends of the range of Triton: the installed one, and the oldest one allowed
compile-check: $(ready) .cache/triton-3.6.0
	$(py) test/compile_check.py
	PYTHONPATH=.cache/triton-3.6.0:$(PYTHONPATH) $(py) test/compile_check.py

mutants: $(ready)
	$(py) test/mutants.py

bench: $(ready)
	mkdir -p .cache
	$(py) -m pytest benchmark --benchmark-json=.cache/bench.json

bench-losses: $(ready)
	$(py) -m benchmark.losses

bench-ops: $(ready)
	$(py) -m benchmark.memory_bound

bench-attention: $(ready)
	$(py) -m benchmark.attention

bench-training: $(ready)
	$(py) -m benchmark.training

bench-curves: $(ready)
	$(py) -m benchmark.curves

coverage: $(ready)
	OMP_NUM_THREADS=1 $(py) -m benchmark.coverage

# make tune, or make tune OP=rms_norm,rope
tune: $(ready)
	$(py) -m benchmark.tune $(OP)

.cache/triton-%: | $(ready)
	$(py) -m pip install --no-deps --target $@ triton==$*

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(py) -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@
