# omnigraph: `make lab` and `make test` are all that most people need. Both make their environment, .venv, by themselves.
#
#   make lab         JupyterLab on the quickstart; more flags for it: make lab LAB_ARGS="--no-browser --ip=0.0.0.0"
#   make voila       the dashboard of notebook 6 as an application, on http://localhost:8866; more flags for it: VOILA_ARGS
#   make notebooks   run every notebook without a browser; the report is build/report/index.html
#   make test        what CI runs: unit tests, notebooks (nbval), browser, ruff, mypy
#   make bench       the project's table of speed, on what device there is, into data/bench/; elsewhere: make bench BENCH_OUT=build/bench
#   make refresh     run the notebooks again and store their outputs; one only: make refresh NOTEBOOKS=notebooks/00_quickstart.ipynb
#   make clean       remove .venv and build
#
# Another interpreter (3.11 to 3.13): make lab PYTHON=python3.12
# On Linux, pip takes torch's CUDA build, some GB. Without an NVIDIA GPU the CPU build does, 0.2 GB:
#   make lab PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# With a GPU and other versions than constraints.txt pins, pip install -e ".[lab]" in an environment of your own works as well.

PYTHON ?= python3
PIP_ARGS ?=
LAB_ARGS ?=
VOILA_ARGS ?=
BENCH_OUT ?= data/bench
BENCH_ARGS ?=
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)
PY := .venv/bin/python
QUIET := NO_COLOR=1 PY_COLORS=0
# One thread a process: the tests run as two processes, and two cores are what many runners have.
TESTING := $(QUIET) OMP_NUM_THREADS=1 PLOTLY_RENDERER=plotly_mimetype
PYTEST := $(TESTING) $(PY) -m pytest --color=no
# --log-level=40 is the kernel's: it warns of its loopback sockets otherwise.
NBCONVERT := $(QUIET) $(PY) -m nbconvert --log-level=WARN --execute --ExecutePreprocessor.timeout=900 \
    --ExecutePreprocessor.extra_arguments=--log-level=40 --ExecutePreprocessor.store_widget_state=False

.DEFAULT_GOAL := help
.PHONY: help lab voila notebooks test style types unit nbval browser bench refresh clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

.venv/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here: install Python 3.11 to 3.13, or name it: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), omnigraph needs 3.11 to 3.13: name one, as in make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments, its venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.lab: pyproject.toml constraints.txt | .venv/bin/pip
	$(QUIET) $(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[lab]'
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/pip
	$(QUIET) $(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[lab,test]'
	@touch .venv/.lab $@

# JupyterLab refuses to run as root unless told so; in a container root is the usual user.
lab: .venv/.lab
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb \
	    $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

# Voila's page asks a CDN for icons that it has itself: the policy keeps all requests on the machine. Its page does not draw plotly's JSON.
voila: .venv/.lab
	PLOTLY_RENDERER=notebook $(PY) -m voila notebooks/06_hit_rates_and_latency.ipynb --Voila.ip=127.0.0.1 \
	    --Voila.tornado_settings="{'headers': {'Content-Security-Policy': \"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:\"}}" $(VOILA_ARGS)

# In a copy, so that a run changes no file of the project. The pages hold plotly.js and ask nothing of the network, MathJax included.
notebooks: .venv/.lab
	@rm -rf build/scratch build/report && mkdir -p build/scratch build/report && cp -R notebooks data build/scratch/
	@failed=; index=build/report/index.html; \
	printf '<!doctype html><meta charset="utf-8"><title>omnigraph notebooks</title><h1>omnigraph notebooks</h1><ol>\n' > $$index; \
	for notebook in $(NOTEBOOKS); do \
	    name=$$(basename $$notebook .ipynb); started=$$(date +%s); verdict=ran; entry="<a href=\"$$name.html\">$$name</a>"; \
	    PLOTLY_RENDERER=plotly_mimetype+notebook $(NBCONVERT) --to html --HTMLExporter.mathjax_url= --HTMLExporter.require_js_url= \
	        --output-dir build/scratch/report build/scratch/$$notebook \
	        && sed -E 's#<script[^>]* src="https://[^"]*mathjax[^"]*"></script>##g' build/scratch/report/$$name.html > build/report/$$name.html \
	        || { verdict=FAILED; entry="$$name: failed"; failed="$$failed $$notebook"; }; \
	    echo "$$name: $$verdict, $$(($$(date +%s) - started)) s"; \
	    echo "<li>$$entry" >> $$index; \
	done; \
	printf '</ol>\n' >> $$index; echo "report: $$index"; \
	[ -z "$$failed" ] || { echo "make: these notebooks raised:$$failed"; exit 1; }

test: style types unit nbval browser

style: .venv/.test
	$(QUIET) $(PY) -m ruff check
	$(QUIET) $(PY) -m ruff format --check

types: .venv/.test
	$(QUIET) $(PY) -m mypy --strict omnigraph/

unit: .venv/.test
	$(PYTEST) -n 2 --dist loadfile -m 'not browser'

nbval: .venv/.test
	$(PYTEST) -n 2 --dist loadscope --nbval --nbval-current-env --nbval-sanitize-with=tests/nbval-sanitize.cfg --nbval-cell-timeout=120 notebooks

browser: .venv/.test
	$(PYTEST) -m browser tests/browser

# No tests, and not part of them: a measurement takes a machine for itself. On a GPU a missed bar is a failure, a warning is none.
bench: .venv/.test
	$(PYTEST) -W default -p pytest_benchmark.plugin --benchmark-storage=file://build/benchmarks --benchmark-columns=median,iqr,rounds \
	    --benchmark-sort=name --bench-out=$(BENCH_OUT) $(BENCH_ARGS) tests/bench/bench_host.py tests/bench/bench_device.py

# Figures are stored as plotly's JSON and as PNG (kaleido draws it with chromium), widgets as nothing: their state would be megabytes.
refresh: .venv/.test
	PLOTLY_RENDERER=plotly_mimetype+png $(NBCONVERT) --to notebook --inplace $(NOTEBOOKS)
	$(QUIET) $(PY) -m nbstripout --keep-output --keep-count $(NOTEBOOKS)
	$(QUIET) $(PY) -m ruff format $(NOTEBOOKS)

clean:
	rm -rf .venv build
