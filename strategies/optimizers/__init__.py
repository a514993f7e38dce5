"""Server optimizers: a step from the released update. Post-processing, so any of them is private."""
