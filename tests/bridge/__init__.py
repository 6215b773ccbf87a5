"""Tests of pdecay.sklearn. The folder must not be named after the package sklearn."""
