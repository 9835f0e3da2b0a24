"""Linear attention with decay in three forms, which README.md derives."""
