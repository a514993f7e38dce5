"""What a run has spent: charged durably before noise is drawn, and stated afterwards."""
