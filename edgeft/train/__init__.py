"""From rows to trained tensors: prepare, trunk, step, loop and checkpoints."""
