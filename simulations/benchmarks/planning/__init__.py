"""Whether predictions of `lacquer plan` come true, and the public numbers that it starts from."""
