"""Tests of compact."""
