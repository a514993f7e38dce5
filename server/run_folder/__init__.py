"""What a run keeps in its folder, and how a run that was interrupted goes on."""
