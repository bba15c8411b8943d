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

.PHONY: help venv test test-long package-test lint format demo zoo generation multimodal weights quantized training plans exports \
	bench loading serving batching docs reference transcripts screenshots clean

help: ## this list
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## .venv with the versions in constraints.txt; all other targets create it

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Two halves run at the same time: ranks leave a core idle now and then. In the first, many tests need no ranks.
BESIDE := $(addprefix tests/, capture compat data_parallel distributed export graph kernels layers optimize passes \
	placement plan report rules solver tensor utils weights zoo)

test: lint ## lint and all tests but the long ones: what every commit must pass
	@mkdir -p build; \
	$(BIN)/python -m pytest $(BESIDE) > build/beside.txt 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(BESIDE)); ranks=$$?; \
	wait $$beside; others=$$?; cat build/beside.txt; exit $$((ranks || others))

# The tests marked `long` too (PARAXIS_LONG=1): hours.
test-long: export PARAXIS_LONG := 1
test-long: test ## all tests, hours

# Downloads torch and everything else once more.
package-test: venv ## install the wheel into an empty environment and run the demo there
	PARAXIS_PACKAGE=1 $(BIN)/python -m pytest tests/test_packaging.py

lint: venv ## ruff, mypy, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy paraxis
	$(BIN)/lint-imports --no-cache --no-logo

format: venv ## ruff's fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: venv ## a small Llama on TP=2 processes of this machine, compared with the unsharded model
	$(BIN)/paraxis demo --tp $(TP)

# Resumes where it was stopped: `rm -r build` to start again. Some of them: `make zoo ONLY=llama,gpt2 TP=4`.
zoo: venv ## every architecture against the unsharded model, hours; ONLY=llama,gpt2 for some
	cd tests && ../$(BIN)/python -m zoo --state ../build/zoo.jsonl \
		$(if $(ONLY),--only '$(ONLY)' --tp $(TP),--page ../docs/results/zoo.md)

generation: venv ## generate() in its modes on many architectures, half an hour
	cd tests && ../$(BIN)/python -m zoo.generation --page ../docs/results/generation.md

batching: venv ## generate_batch on many architectures, half an hour; ONLY=llama,gpt2 for some
	cd tests && ../$(BIN)/python -m zoo.batching --state ../build/batching.jsonl --page ../docs/results/batching.md \
		$(if $(ONLY),--only '$(ONLY)')

# `make multimodal SO_FAR=1` runs nothing, and writes the page of the results that there are.
multimodal: venv ## models that take images, videos or audio, hours; ONLY=llava,whisper for some
	cd tests && ../$(BIN)/python -m zoo.multimodal --state ../build/multimodal.jsonl \
		$(if $(ONLY),--only '$(ONLY)' --tp $(TP),--page ../docs/results/multimodal.md $(if $(SO_FAR),--so-far))

weights: venv ## checkpoints loaded and saved by 2 and 4 ranks, compared bit by bit, half an hour
	cd tests && ../$(BIN)/python -m zoo.weights --state ../build/weights.jsonl --page ../docs/results/weights.md

# `make quantized SO_FAR=1` runs nothing, and writes the page of the results that there are.
quantized: venv ## quantized formats on 1 to 4 ranks, compared and saved bit by bit, hours; ONLY=gptq,awq/moe for some
	cd tests && ../$(BIN)/python -m zoo.quantized --state ../build/quantized.jsonl \
		$(if $(ONLY),--only '$(ONLY)' --tp $(TP),--page ../docs/results/quantized.md $(if $(SO_FAR),--so-far))

training: venv ## AdamW steps against the unsharded model on many architectures, an hour
	cd tests && ../$(BIN)/python -m zoo.training --state ../build/training.jsonl --page ../docs/results/training.md

plans: venv ## plans against those that transformers ships, ten minutes
	cd tests && ../$(BIN)/python -m zoo.plans --page ../docs/results/plans.md

exports: venv ## exported plans run by transformers and torch, an hour and a half
	cd tests && ../$(BIN)/python -m zoo.exports --state ../build/exports.jsonl --page ../docs/results/exports.md \
		$(if $(ONLY),--only '$(ONLY)')

SHAPES ?= llama,gpt2,mixtral
bench: venv ## speed against transformers' tensor parallelism and DTensor, half an hour; SHAPES=llama for one
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/generation.py --shapes $(SHAPES) --tp $(TP) --out docs/results

loading: venv ## loading of 2 GB checkpoints against transformers, ten minutes
	$(BIN)/python benchmarks/loading.py --out docs/results

# Two runs of clients against a service follow: 200, and more than its queue holds.
serving: venv ## continuous batching against transformers', and a service under load, half an hour
	$(BIN)/python benchmarks/serving.py --tp $(TP) --page docs/results/serving.md
	$(BIN)/python benchmarks/serving.py --tp $(TP) --load --page docs/results/serving.md
	$(BIN)/python benchmarks/serving.py --tp $(TP) --load --clients 1000 --seconds 60 --page docs/results/serving.md

docs: venv ## the site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: venv ## docs/reference and the module map of CONTRIBUTING.md, from docstrings
	cd docs && ../$(BIN)/python -m tools reference

# PAGES=tutorial=verify: of pages named like tutorial, those whose commands contain verify.
transcripts: venv ## run the commands shown in docs/ again and paste their output, five minutes
	cd docs && ../$(BIN)/python -m tools transcripts $(PAGES)

screenshots: venv ## pictures of the report; needs chromium
	cd docs && ../$(BIN)/python -m tools screenshots

clean: ## remove .venv, build and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
