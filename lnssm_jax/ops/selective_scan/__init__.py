"""The selective state-space scan of Mamba (S6); README.md derives it."""
