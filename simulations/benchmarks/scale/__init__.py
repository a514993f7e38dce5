"""What whole runs cost as they grow, and until they begin."""
