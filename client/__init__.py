"""The code that runs where the data lives."""
