"""Many runs from one file, and the table of what they came to."""
