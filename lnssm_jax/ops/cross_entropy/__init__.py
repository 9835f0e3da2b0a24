"""Cross-entropy of logits together with its gradient; README.md says why it is not public."""
