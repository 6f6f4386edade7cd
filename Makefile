PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

OLDEST_DEEPSPEED := 0.14.4
PYTHONS := 3.10 3.13
DOCS := .venv-docs
NEWEST := .venv-newest

.PHONY: demo test test-unit test-busy test-extended test-oldest test-newest test-pythons test-gpu wheels fuzz lint docs clean

demo: $(READY)  ## Profile, optimise and train GPT-3 (tiny) on four pipeline stages with simulated GPUs.
	$(BIN)/python examples/gpt3/demo.py

# Some tests wait for processes, so more of them run at once than there are cores; a second thread of BLAS only competes.
test test-unit test-extended: export OMP_NUM_THREADS ?= 1

test: $(READY)  ## Unit tests, and integration tests that launch real DeepSpeed ranks.
	$(BIN)/pytest -m "not extended" -n 3 --dist worksteal

test-unit: $(READY)  ## Unit tests only.
	$(BIN)/pytest -m "not integration and not extended" -n 3 --dist worksteal

test-busy: $(READY)  ## `make test` three times in a row while two processes keep two cores busy.
	@for core in 1 2; do sh -c 'while :; do :; done' & busy="$$busy $$!"; done; trap "kill $$busy" EXIT; trap "exit 1" INT TERM HUP; \
	for run in 1 2 3; do $(MAKE) test || failed="$$failed $$run"; done; \
	test -z "$$failed" || { echo "Failed beside busy cores: run$$failed of 3"; exit 1; }

test-extended: $(READY)  ## More integration tests: faults, odd jobs, the examples, a cluster's files, the wheel.
	$(BIN)/pytest -m extended -n 2 --dist loadfile --max-worker-restart 0

# Some of them: make test-gpu CHECKS="spans requests". No clock is changed. Results in runs/gpu, also of earlier calls.
ifdef WHEELS
test-gpu:
	rm -rf .site-gpu
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target .site-gpu $(WHEELS)/*.whl
	@PYTHONPATH=$(CURDIR)/.site-gpu $(PYTHON) tests/gpu_checks/run.py $(CHECKS)
else
test-gpu: $(READY)  ## Checks on a real GPU, with evidence; without one, a line with the reason for skipping them.
	@$(BIN)/python tests/gpu_checks/run.py $(CHECKS)
endif

# For a machine without a network: carry the folder there, then make test-gpu WHEELS=wheels PYTHON=python3.12.
wheels: $(READY)  ## Wheels of what the checks on a GPU import, in wheels/: make wheels FOR=3.12
	$(BIN)/python tests/gpu_checks/wheels.py wheels $(or $(FOR),3.12)

# With a folder for compiled extensions of its own: what another DeepSpeed has compiled is of no use, or harmful.
test-oldest: .deepspeed-$(OLDEST_DEEPSPEED)/.ready  ## The oldest DeepSpeed that is supported, which has no DualPipeV.
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.deepspeed-$(OLDEST_DEEPSPEED)/extensions \
	PYTHONPATH=$(CURDIR)/.deepspeed-$(OLDEST_DEEPSPEED) $(BIN)/pytest -k "not dualpipev" \
		tests/engines/deepspeed tests/integration/test_training_is_untouched.py

.deepspeed-$(OLDEST_DEEPSPEED)/.ready: $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--upgrade --target $(@D) deepspeed==$(OLDEST_DEEPSPEED)
	touch $@

# Others than the newest: make test-newest TORCH=2.14.1 DEEPSPEED=0.19.8 MEGATRON=0.19.2; some of the tests: TESTS=tests/engines.
test-newest: export OMP_NUM_THREADS ?= 1
test-newest:  ## Tests of engines and integration tests with the newest torch, DeepSpeed and Megatron-Core, on Python 3.12.
	@python=$$(tests/support/find_python.sh 3.12) || { echo "Python 3.12 is not installed. Install it, or add it to the PATH."; exit 1; }; \
	$$python -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch$(addprefix ==,$(TORCH)) deepspeed$(addprefix ==,$(DEEPSPEED)) \
		megatron-core$(addprefix ==,$(MEGATRON)) --editable ".[examples,zeus]" --group dev hatchling
	$(NEWEST)/bin/python -m pip list | grep -E "^(torch|deepspeed|megatron-core) "
	TORCH_EXTENSIONS_DIR=$(CURDIR)/$(NEWEST)/extensions $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 \
		$(or $(TESTS),tests/engines tests/integration)

test-pythons: $(PYTHONS:%=test-python-%)  ## Unit tests that need no torch, on the oldest and the newest Python that are installed.

test-python-%:
	@python=$$(tests/support/find_python.sh $*) || { echo "Python $* is not installed: no test runs on it."; exit 0; }; \
	cmp --silent requirements-pythons.lock .venv-$*/installed.lock || { \
		$$python -m venv --clear .venv-$* && \
		.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-pythons.lock && \
		cp requirements-pythons.lock .venv-$*/installed.lock; \
	} && env -u CI PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support .venv-$*/bin/python -m pytest -p without_torch -n 2 \
		-m "not integration and not extended"

fuzz: $(READY)  ## Damaged files on every command that reads them, for hours; always new ones.
	FUZZ_EXAMPLES=20000 $(BIN)/pytest tests/fuzz -x -n 2

trials: $(READY)  ## Jobs ended in 72 scenarios, six times each, on the stub driver: does a clock stay locked?
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.torch_extensions PYTHONPATH=$(CURDIR):tests:tests/support $(BIN)/python -m trials

lint: $(READY)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)/.ready  ## The documentation as a site in site/, without torch; a link that leads nowhere is an error.
	PYTHONPATH=. $(DOCS)/bin/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

$(DOCS)/.ready: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.lock
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(NEWEST) $(PYTHONS:%=.venv-%) .deepspeed-* .site-gpu wheels runs site

# Made again when the pins or the package's metadata change; otherwise targets start at once.
$(READY): requirements.lock pyproject.toml
	@echo "Installing the packages of requirements.lock in $(VENV): some minutes, without output."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)
