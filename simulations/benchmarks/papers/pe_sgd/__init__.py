"""PE-SGD and its rivals on a few hundred texts: whole trainings, and one noisy step."""
