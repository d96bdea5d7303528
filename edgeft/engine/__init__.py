"""The model as the trainer runs it: stack, blocks, kernels and memory."""
