"""Metrics of a run: reading them from the device, console, loggers, traces, plots."""
