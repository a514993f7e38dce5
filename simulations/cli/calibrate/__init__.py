"""The command ``lacquer calibrate`` and its pages."""
