# Everything runs in .venv, which the first command makes. torch comes through constraints.txt.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.PHONY: demo test quicktest lint bench records tables study study-check docs clean

demo: $(VENV)/lab
	$(VENV)/bin/pdecay demo

test: $(VENV)/test
	$(VENV)/bin/python -m pytest -q -rs -n $(WORKERS) --dist worksteal

# The tests without those marked slow: about a minute on two idle cores. Kernels are compiled once.
quicktest: $(VENV)/test
	PDECAY_CACHE=$(abspath $(VENV))/cache \
	    $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow' tests

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/lab
	$(VENV)/bin/pdecay bench

# Measures everything that README and docs say about speed and sizes, and fills it in. About an hour
# on an idle machine. The study, bridge.py, gpt2.py, compact_zoo.py and beyond.py have commands of
# their own.
records: $(VENV)/test
	$(VENV)/bin/pdecay bench
	$(VENV)/bin/pdecay bench deploy
	cp pdecay-bench/bench.json pdecay-bench/deploy.json benchmarks/records
	$(VENV)/bin/python benchmarks/sparse_linear.py
	$(VENV)/bin/python benchmarks/files.py size
	$(VENV)/bin/python benchmarks/files.py speed
	-$(VENV)/bin/python benchmarks/busy_deploy.py --threads 1 2 --record benchmarks/records/busy_deploy.json
	$(MAKE) tables
	$(VENV)/bin/python benchmarks/pages.py

# Fills README and docs from the records.
tables: $(VENV)/test
	$(VENV)/bin/python benchmarks/speed_tables.py
	$(VENV)/bin/python benchmarks/deploy_tables.py
	$(VENV)/bin/python benchmarks/bridge_tables.py
	$(VENV)/bin/python benchmarks/study_report.py
	$(VENV)/bin/python benchmarks/sparsity_target.py table
	$(VENV)/bin/python benchmarks/beyond.py table

# Many hours of two cores; resumes where it was interrupted.
study: $(VENV)/lab
	$(VENV)/bin/python benchmarks/study.py tune --workers $(WORKERS)
	$(VENV)/bin/python benchmarks/study.py final --workers $(WORKERS)
	$(VENV)/bin/python benchmarks/study.py ablation --task shakespeare --scale quick --workers $(WORKERS)
	$(VENV)/bin/python benchmarks/study.py contours --task shakespeare --scale quick --workers $(WORKERS)
	$(VENV)/bin/python benchmarks/study_deploy.py
	$(VENV)/bin/python benchmarks/study_report.py

# Repeats a few runs of the study and compares them with the records: less than 15 minutes.
study-check: $(VENV)/lab
	$(VENV)/bin/python benchmarks/study.py check --workers $(WORKERS)

docs: $(VENV)/dev
	$(VENV)/bin/sphinx-build --fail-on-warning --keep-going docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build pdecay-demo pdecay-bench pdecay-report

# One file for each set of extras that is installed, newer than what it was installed from.
$(VENV)/lab $(VENV)/test $(VENV)/dev: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[$(@F)]"
	touch $@
