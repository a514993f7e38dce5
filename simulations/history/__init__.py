"""Many runs looked at together: which there are, what they have cost, how they compare."""
