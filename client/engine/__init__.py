"""Training of many clients, or gradients of many records, at once on one frozen base model."""
