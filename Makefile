# make run   set up .venv and run the smoke suite
# make test  set up .venv with the test tools, run linters and the whole pytest suite
PYTHON ?= python3
BIN := .venv/bin

run: .venv/installed
	$(BIN)/threearm run

# Two processes, one thread each; what measures time runs afterwards, alone. PROCESSES=0 runs one.
PROCESSES ?= 2
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not perf" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m perf

check: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv || { echo "on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[test,dev]' triton
	touch $@

.PHONY: run test check
