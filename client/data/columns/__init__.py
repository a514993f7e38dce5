"""The columns of a file of records: their cells as they are written, names in one normal form, classes."""
