# Every target includes its set-up. Override the interpreter with `make PYTHON=python3.12 test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env analyze test lint types format bench fuzz trust figures pretrained larger encodings docs site pictures shown notebooks zoo clean
.DEFAULT_GOAL := analyze

env: $(VENV)/.installed

# torch first and exactly: an open range would fetch gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml papers/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,notebooks]' --editable ./papers
	touch $@

analyze: env
	$(BIN)/repo-interp analyze --out runs/first --overwrite

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: env
	$(BIN)/ruff format --check repo_interp papers tests benchmarks docs
	$(BIN)/ruff check repo_interp papers tests benchmarks docs

format: env
	$(BIN)/ruff format repo_interp papers tests benchmarks docs
	$(BIN)/ruff check --fix repo_interp papers tests benchmarks docs

types: env
	$(BIN)/pyright

# The papers' figures and the table of claims, from the checkpoints that come with the package. After an interruption the
# same command continues: measurements are stored in figures/.cache.
figures: env
	$(BIN)/repo-interp figures all --out figures --overwrite

# SmolLM2-135M, Gemma 3 270M and the adapters that come with the package, together with the zoo: the plan of papers/pretrained.toml,
# after its models are fetched. After an interruption the same command continues.
pretrained: env
	$(BIN)/repo-interp fetch texts
	$(BIN)/repo-interp fetch smollm2-135m
	$(BIN)/repo-interp fetch gemma3-270m
	$(BIN)/repo-interp figures --plan papers/pretrained.toml --cache figures/.cache --overwrite

# A language model of 8 layers x 256 on windows of 512 tokens, continued with RePo, RoPE and NoPE, three seeds of each, and RePo's claims on
# it: nine hours of training on one core. The weights are too large to ship. After an interruption the same command continues.
larger: env
	$(BIN)/repo-interp zoo train language/repo_512 language/rope_continued_512 language/nope_512
	$(BIN)/repo-interp figures repo --no-zoo --checkpoint language-512-repo=runs/zoo/language/repo_512 \
		--checkpoint language-512-rope=runs/zoo/language/rope_continued_512 --checkpoint language-512-nope=runs/zoo/language/nope_512 \
		--experiment 'ranges of positions' --experiment 'chunks of positions' --experiment segments \
		--set prompts=16 --out figures/language-512-repo/held-out --cache figures/.cache --overwrite

# Trains the empty cells of docs/encodings.md by the recipes: days of one core. After an interruption the same command continues.
encodings: env
	$(BIN)/python docs/encodings.py --fill -1

# Runs every notebook in a separate kernel and stores its outputs. Then read the prose again. The ninth and the eleventh need
# `repo-interp fetch smollm2-135m`, the eleventh `repo-interp fetch texts` too.
notebooks: env
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace notebooks/*.ipynb

# Writes the pages of commands and errors and the tables of docs/ from the code, then the site.
docs: env
	$(BIN)/python docs/make.py
	$(MAKE) site

# The documentation as a site in build/site; a broken link or anchor is an error. `python -m http.server --directory build/site` shows it.
site: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/build_site.py

# The pictures of docs/, and the first ones of the README from the explorer in Chromium.
pictures: env
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/explorer_pictures.py

# Checks docs/pictures against the code, and docs/recipes.md against the outputs of its recipes. Recipes of models
# that cannot be fetched are named and not compared.
shown: env
	-$(BIN)/repo-interp fetch smollm2-135m
	-$(BIN)/repo-interp fetch gemma3-270m
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python docs/pictures.py --check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python docs/recipes.py --check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python docs/learned_positions.py --check

# Trains every checkpoint that comes with the packages again by the plan: hours. After an interruption the same command continues.
zoo: env
	$(BIN)/repo-interp zoo train --jobs 2 --into papers/zoo

# Measures the cost of everything: ten minutes of two cores. A minute or two: make bench PARTS="layer/512 commands/niah".
bench: env
	$(BIN)/python -m benchmarks.cost $(PARTS)

# Minutes of fuzzing; the suite runs the same for seconds. Findings are printed, and stored in .hypothesis/ for the next run.
fuzz: env
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests/instrument/cli/test_fuzz.py

# Robustness tests, as a table: hours, mostly for mutants. Single parts: make trust PARTS="kills/score disk".
trust: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trust]'
	$(BIN)/python -m benchmarks.robustness $(PARTS)

clean:
	rm -rf $(VENV) runs build dist mutants .versions .hypothesis .pytest_cache .ruff_cache
