"""Base models, their tasks, and LoRA adapters in and out of files."""
