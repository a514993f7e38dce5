"""Commands about runs that were made: runs, budget, compare."""
