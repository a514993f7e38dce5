"""The files in a run's folder, and how an interrupted run is resumed from them."""
