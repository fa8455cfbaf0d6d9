# The commands CI runs, by the same names. `make demo` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out
PYTEST_WORKERS ?= 2

.PHONY: demo test lint app lab notebooks book screenshots bench bench-gpu clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "flashsim needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Light: matplotlib and this package, no torch.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[figures]'
	@touch $@

# Everything, with the pins of constraints.txt.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/flashsim compare v1 v3.2 v4-flash v4.1-flash --context 1M
	@echo; $(BIN)/flashsim verify --out $(OUT)
	@echo; $(BIN)/flashsim figures --out $(OUT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --benchmark-disable

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# JupyterLab on the course. Pictures of a notebook that is not trusted are not shown until its cells have run.
lab: $(VENV)/.dev
	$(BIN)/jupyter trust notebooks/*.ipynb > /dev/null
	$(BIN)/jupyter lab --config notebooks/lab/jupyter_lab_config.py --ServerApp.root_dir=. notebooks/00_tour.ipynb

# The KV budget explorer alone, in a browser; its page asks no other server for anything.
app: $(VENV)/.dev
	JUPYTER_PATH=notebooks/app $(BIN)/voila notebooks/explorer.ipynb --template=flashsim

# Every lesson from top to bottom; outputs are written as they are committed.
notebooks: $(VENV)/.dev
	$(BIN)/python notebooks/execute.py

book: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -q book $(OUT)/book/html
	@echo "$(OUT)/book/html/index.html"

# Pictures of pages of the book, of the course in JupyterLab and of the explorer, for people to look at.
screenshots: book
	$(BIN)/python tests/browser/screenshots.py $(OUT)/screenshots $(OUT)/book/html

bench: $(VENV)/.dev
	$(BIN)/python -m pytest tests/flashsim/bench_speed.py --benchmark-only --benchmark-columns=min,median,max,rounds

# On a machine with a CUDA device and its own torch and triton: nothing is installed. Rows are appended.
bench-gpu:
	PYTHONPATH=. $(PYTHON) -m kernels.bench --out data/measured/kernels.csv

clean:
	rm -rf $(VENV) $(OUT) book/_generated dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
