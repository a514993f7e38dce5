"""Commands about settings: every key, a file to start from, the presets."""
