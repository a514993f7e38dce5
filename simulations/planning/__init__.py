"""Planning of a run before it is made: its signal against its noise, and which settings have the most."""
