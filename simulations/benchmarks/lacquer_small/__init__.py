"""How the model ``lacquer-small`` was made: its corpus, tokenizer, training and card.

python -m simulations.benchmarks.lacquer_small --data FOLDER --out FOLDER --minutes 100
"""
