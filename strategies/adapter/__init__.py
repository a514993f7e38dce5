"""The adapter as one vector: where each value lies, and what of it a round trains."""
