"""From a source of texts to tokenised records of clients, a validation set and a test set."""
