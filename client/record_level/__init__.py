"""DP-SGD inside a client: every record, or every group of records, is protected."""
