"""Messages between server and clients, and their form as Flower records."""
