"""Commands for the model of a finished run: predict, generate, evaluate, export."""
