"""What releases cost, and the least noise that keeps a target."""
