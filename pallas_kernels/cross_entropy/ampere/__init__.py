"""The kernel for every GPU since Ampere: logits through registers."""
