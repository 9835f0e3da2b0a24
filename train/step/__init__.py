"""The compiled training step: model, state, loss, optimizer, step guard, model FLOPs."""
