"""Keep pytest's main process from importing the files that run in a process of their own."""

import os

if "PDECAY_KERAS_PROCESS" not in os.environ:
    collect_ignore_glob = ["backend_*.py"]
