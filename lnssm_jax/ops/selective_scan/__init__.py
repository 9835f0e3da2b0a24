"""The selective state-space scan of Mamba (S6), which README.md derives."""
