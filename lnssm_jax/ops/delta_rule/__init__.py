"""The delta rule in two forms, which README.md derives."""
