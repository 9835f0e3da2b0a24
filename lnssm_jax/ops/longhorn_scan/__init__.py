"""The diagonal scan of Longhorn, which README.md derives."""
