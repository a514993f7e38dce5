"""How the model ``lacquer-small`` was made."""
