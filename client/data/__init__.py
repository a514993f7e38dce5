"""Preparation of data: a source of texts becomes tokenised records of clients, a validation set and a test set."""
