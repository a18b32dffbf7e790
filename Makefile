# The commands of everyday work; CONTRIBUTING.md says when to run which.

PYTHON := .venv/bin/python
FIGURES := docs/measured/avx512_bf16.json

.DEFAULT_GOAL := help
.PHONY: help setup test fast lint format types docs bench pictures

help: ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: ## make or update .venv, with what the tests need
	scripts/test --setup-only

test: ## run all tests, long proofs too; what has to pass before a change lands
	scripts/test --all

fast: ## run the tests without the slow ones, in two to three minutes
	scripts/test --fast

lint: setup ## check style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: setup ## format the code, and correct what ruff can correct
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: setup ## check the types
	$(PYTHON) -m mypy

docs: ## run the code blocks of README.md and docs/, check their links, and build the site
	scripts/test tests/test_readme.py tests/test_site.py
	scripts/docs

bench: setup ## compare whole models with float32, on one core; takes long, scripts/bench/models --model NAME does not
	$(PYTHON) scripts/bench/models --rounds 3 --json bench.json

pictures: ## draw docs/speed.svg anew; needs matplotlib in .venv
	$(PYTHON) scripts/bench/plot $(FIGURES) docs/speed.svg --model resnet50-16 \
		--model mobilenet_v2-8 --model resnext50_32x4d-2 --model bert_base-4 --model lstm_650-20
