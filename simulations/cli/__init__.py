"""The lacquer command."""
