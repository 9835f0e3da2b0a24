"""Measurements. Each module but `csv_rows` is a command: `python -m benchmarks.NAME --help`."""
