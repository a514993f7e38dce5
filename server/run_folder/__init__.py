"""What a run keeps in its folder, and how an interrupted run is resumed."""
