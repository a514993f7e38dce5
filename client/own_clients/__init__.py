"""What a node with many clients of its own keeps of a run, and holds the server's requests against."""
