"""The controller ``rl``: its page is ``controller.py``."""
