"""LoRA aggregations: which factors a round trains and how the released sum enters the global adapter."""
