"""The base model ``lacquer-small``; README.md is its card. Written by ``simulations.pretrain.pack``."""

SHA256 = {
    "config.json": "",
    "model.safetensors": "",
    "tokenizer.json": "",
    "tokenizer_config.json": "",
}
