"""Controllers: one method, one file; the file's docstring is the method's page."""
