"""What runs where the data lives."""
