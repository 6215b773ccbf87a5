"""Tests of the report: grouping, selection, figures, tables and the page in a browser."""
