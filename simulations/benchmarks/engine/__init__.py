"""Speed and memory of the training engine."""
