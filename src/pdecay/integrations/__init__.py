"""Callbacks and helpers for training frameworks. Each module needs the package of its name."""
