"""Commands that break a training run on purpose; docs/reliability.md has what they found."""
