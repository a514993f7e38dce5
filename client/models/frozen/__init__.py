"""The frozen weights of a base model: how they are held, and what multiplies by them."""
