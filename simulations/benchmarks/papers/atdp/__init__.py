"""ATDP and phases with and without noise: the chains of its paper, and exposure at equal perplexity."""
