"""Experiments: data, models, methods, training, sweeps, reports, benchmarks and the demo.

The lab needs ``pip install 'pdecay[lab]'``.
"""
