# Works on a bare clone: the only thing needed beforehand is python3 (3.10 to 3.13).
PYTHON ?= python3
TP ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests and the demo run many processes on one machine and never need the network.
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: venv test lint format demo zoo generation weights training plans exports bench loading docs transcripts screenshots clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# `make test PARAXIS_LONG=1` also runs the tests that take long.
export PARAXIS_LONG

# Two halves run beside one another: ranks leave a core idle now and then. In the first, many need no ranks.
BESIDE := tests/rules tests/solver tests/capture tests/kernels tests/passes tests/zoo tests/distributed tests/layers \
	tests/weights tests/test_explaining.py tests/test_inputs.py tests/test_placement.py tests/test_plan.py \
	tests/test_progress.py tests/test_report.py

test: lint
	@mkdir -p build; \
	$(BIN)/python -m pytest $(BESIDE) > build/beside.txt 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(BESIDE)); ranks=$$?; \
	wait $$beside; others=$$?; cat build/beside.txt; exit $$((ranks || others))

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy paraxis

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: venv
	$(BIN)/paraxis demo --tp $(TP)

# Every architecture against the unsharded one; hours. It goes on where it was stopped: `rm -r build` to start anew.
# A few of them: `make zoo ONLY=llama,gpt2 TP=4`.
zoo: venv
	cd tests && ../$(BIN)/python -m zoo --state ../build/zoo.jsonl \
		$(if $(ONLY),--only '$(ONLY)' --tp $(TP),--page ../docs/results/zoo.md)

# Generation in its modes (caches, beams, padding, sampling) on many architectures; about half an hour.
generation: venv
	cd tests && ../$(BIN)/python -m zoo.generation --page ../docs/results/generation.md

# Checkpoints loaded and saved by 2 and 4 ranks, compared bit by bit, on many architectures; half an hour.
weights: venv
	cd tests && ../$(BIN)/python -m zoo.weights --state ../build/weights.jsonl --page ../docs/results/weights.md

# Steps of AdamW beside the unsharded model, on many architectures; an hour.
training: venv
	cd tests && ../$(BIN)/python -m zoo.training --state ../build/training.jsonl --page ../docs/results/training.md

# Plans beside the hand-written ones of transformers; ten minutes.
plans: venv
	cd tests && ../$(BIN)/python -m zoo.plans --page ../docs/results/plans.md

# Exported plans run by transformers and torch, for every type of causal language model; an hour and a half.
exports: venv
	cd tests && ../$(BIN)/python -m zoo.exports --state ../build/exports.jsonl --page ../docs/results/exports.md \
		$(if $(ONLY),--only '$(ONLY)')

# Side by side with transformers' tensor parallelism and others; about half an hour. `make bench SHAPES=llama`.
SHAPES ?= llama,gpt2,mixtral
bench: venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/generation.py --shapes $(SHAPES) --tp $(TP) --out docs/results

# Checkpoints of over 2 GB, side by side with transformers; ten minutes.
loading: venv
	$(BIN)/python benchmarks/loading.py --out docs/results

# The documentation as a site of plain files; links that lead nowhere fail.
docs: venv
	cd docs && ../$(BIN)/python -m maker build ../build/site

# What the commands in the documentation print, run again; five minutes. `make transcripts PAGES=tutorial=verify`.
transcripts: venv
	cd docs && ../$(BIN)/python -m maker transcripts $(PAGES)

# Pictures of the report, by Chromium.
screenshots: venv
	cd docs && ../$(BIN)/python -m maker screenshots

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
