"""What is told before a run: answers about its units, and prices of correlated noise."""
