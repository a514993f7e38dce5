"""The commands of ``lacquer``, each in a module named after it."""
