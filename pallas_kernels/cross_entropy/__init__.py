"""Softmax cross-entropy of float32 logits, with its gradient, in one pass over GMEM."""
