"""How the model ``lacquer-small`` was made: its corpus, tokenizer, training and card.

python -m simulations.pretrain --data FOLDER --out FOLDER --minutes 100
"""
