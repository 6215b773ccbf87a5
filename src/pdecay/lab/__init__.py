"""Experiments: what the demo trains, measures and draws. Needs ``pip install 'pdecay[lab]'``."""
