"""The state that a node keeps of a run on its own disk, and holds the server's requests against."""
