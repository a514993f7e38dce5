"""``lacquer calibrate``."""
