"""Linear attention over a few of many states, in three forms, which README.md derives."""
