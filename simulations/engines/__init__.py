"""Where a run runs: Flower on Ray, or one process."""
