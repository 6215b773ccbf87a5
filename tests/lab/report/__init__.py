"""The report: from records to figures, tables and a page that works in a browser."""
