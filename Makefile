# Every target does the set-up it needs. Override the interpreter with `make PYTHON=python3.12 test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env analyze test lint types format bench fuzz trust figures pretrained larger docs site pictures notebooks zoo clean
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

# The papers' figures and the table of claims, from the checkpoints that come with the package. Interrupted, the next
# time goes on: what was measured is kept in figures/.cache.
figures: env
	$(BIN)/repo-interp figures all --out figures --overwrite

# SmolLM2-135M and Gemma 3 270M beside the zoo: HoPE's claims on random tokens, Position Generalization's on code and on prose; and the adapters that come
# with the package, RePo's claims on held-out text, on words to reverse and on needles, Position Generalization's on prose. It is fetched
# first; each takes one core about half an hour, words to reverse a few minutes, P7 at 8,192 and 16,384 tokens (long-code) more than an
# hour. Interrupted, the next time goes on.
pretrained: env
	$(BIN)/repo-interp fetch texts
	$(BIN)/repo-interp fetch smollm2-135m
	$(BIN)/repo-interp figures hope --no-zoo --checkpoint smollm2-135m=smollm2-135m --set controls=10 \
		--out figures/smollm2-135m/random-tokens --cache figures/.cache --overwrite
	$(BIN)/repo-interp fetch gemma3-270m
	$(BIN)/repo-interp figures hope --no-zoo --checkpoint gemma3-270m=gemma3-270m --set controls=10 --set length=1024 \
		--out figures/gemma3-270m/random-tokens --cache figures/.cache --overwrite
	for text in code prose; do \
		$(BIN)/repo-interp figures position-generalization --no-zoo --checkpoint smollm2-135m=smollm2-135m --set corpus=pinned-$$text \
			--fast --set controls=10 --out figures/smollm2-135m/$$text --cache figures/.cache --overwrite || exit 1; \
		$(BIN)/repo-interp figures position-generalization --no-zoo --checkpoint gemma3-270m=gemma3-270m --set corpus=pinned-$$text \
			--fast --set controls=10 --experiment fits --experiment rotation --experiment extrapolation \
			--out figures/gemma3-270m/$$text --cache figures/.cache --overwrite || exit 1; \
	done
	$(BIN)/repo-interp figures position-generalization --no-zoo --checkpoint gemma3-270m=gemma3-270m --set corpus=pinned-prose --fast \
		--experiment tolerance --out figures/gemma3-270m/disturbed-prose --cache figures/.cache --overwrite
	$(BIN)/repo-interp figures position-generalization --no-zoo --checkpoint smollm2-135m=smollm2-135m --experiment extrapolation \
		--set corpus=pinned-code --set length=0 --set reach=2 --set longer=8 --set sequences=2 --set batch_size=1 \
		--out figures/smollm2-135m/long-code --cache figures/.cache --overwrite
	$(BIN)/repo-interp figures repo --no-zoo --checkpoint smollm2-135m-repo=smollm2-135m/repo \
		--experiment 'ranges of positions' --experiment 'chunks of positions' --experiment segments --set prompts=8 --set batch_size=4 \
		--set corpus=pinned-prose --out figures/smollm2-135m-repo/prose --cache figures/.cache --overwrite
	$(BIN)/repo-interp figures repo --no-zoo --checkpoint smollm2-135m-repo=smollm2-135m/repo \
		--experiment 'mirror effect' --set prompts=64 --set corpus=pinned-prose \
		--out figures/smollm2-135m-repo/reversal --cache figures/.cache --overwrite
	$(BIN)/repo-interp figures repo --no-zoo \
		$(foreach scheme,repo rope,--checkpoint smollm2-135m-$(scheme)=smollm2-135m/$(scheme)) \
		--experiment 'needles in a haystack' --experiment 'attention mass' --set prompts=24 --set score_prompts=24 --set batch_size=8 --set corpus=pinned-prose \
		--out figures/smollm2-135m-repo/needles --cache figures/.cache --overwrite
	$(BIN)/repo-interp figures position-generalization --no-zoo \
		$(foreach scheme,repo rope,--checkpoint smollm2-135m-$(scheme)=smollm2-135m/$(scheme)) \
		--set corpus=pinned-prose --fast --set controls=10 --experiment fits --experiment tolerance \
		--out figures/smollm2-135m-repo/prose --cache figures/.cache --overwrite

# A language model of 8 layers x 256 on windows of 512 tokens, continued with RePo, RoPE and NoPE, three seeds of each, and RePo's claims on
# it: nine hours of training on one core, whose weights are too large to ship. Interrupted, the next time goes on.
larger: env
	$(BIN)/repo-interp zoo train language/repo_512 language/rope_continued_512 language/nope_512
	$(BIN)/repo-interp figures repo --no-zoo --checkpoint language-512-repo=runs/zoo/language/repo_512 \
		--checkpoint language-512-rope=runs/zoo/language/rope_continued_512 --checkpoint language-512-nope=runs/zoo/language/nope_512 \
		--experiment 'ranges of positions' --experiment 'chunks of positions' --experiment segments \
		--set prompts=16 --out figures/language-512-repo/held-out --cache figures/.cache --overwrite

# Runs every notebook in a kernel of its own and stores its outputs. Then read the prose again. The ninth and the eleventh need
# `repo-interp fetch smollm2-135m`, the eleventh `repo-interp fetch texts` too.
notebooks: env
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace notebooks/*.ipynb

# The pages of commands and errors and the tables of docs/, from the code; then the site.
docs: env
	$(BIN)/python docs/make.py
	$(MAKE) site

# The documentation as a site in build/site; a broken link or anchor is an error. `python -m http.server --directory build/site` shows it.
site: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/build_site.py

# The first pictures of the README, from the explorer in Chromium.
pictures: env
	$(BIN)/python docs/explorer_pictures.py

# Every checkpoint that comes with the packages, trained again by the plan: hours. Interrupted, the next time goes on.
zoo: env
	$(BIN)/repo-interp zoo train --jobs 2 --into papers/zoo

# What everything costs: ten minutes of two cores. A minute or two: make bench PARTS="layer/512 commands/niah".
bench: env
	$(BIN)/python -m benchmarks.cost $(PARTS)

# Minutes of fuzzing; the suite has seconds of the same. What it finds is printed, and kept in .hypothesis/ for the next time.
fuzz: env
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests/instrument/cli/test_fuzz.py

# What was tried to break it, as a table: hours, most of them mutants. Some of it: make trust PARTS="kills/score disk".
trust: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trust]'
	$(BIN)/python -m benchmarks.robustness $(PARTS)

clean:
	rm -rf $(VENV) runs build dist mutants .versions .hypothesis .pytest_cache .ruff_cache
