"""Tests of pdecay.keras.

Keras chooses its backend once for each process. ``test_backends.py`` therefore runs the files
``backend_*.py`` in one process for each backend.
"""
