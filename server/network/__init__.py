"""Who is connected, and on which terms."""
