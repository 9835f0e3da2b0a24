"""Scores of any model, and what it costs: perplexity, lm-eval, states, FLOPs."""
