"""RWKV-4's weighted mean of values in log space, in three forms, which README.md derives."""
