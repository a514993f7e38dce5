"""A run as people read it: the report page, plots, the summary in the terminal."""
