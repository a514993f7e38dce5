"""The base model ``lacquer-small``; README.md is its card."""

SHA256 = {
    "config.json": "d64100086b96e4dd1ab04f9e184a44143dbd6488f73609db7bcd72d5d0e47d54",
    "model.safetensors": "5ed42f02dbdabcab94f08cf872ad17157d84dd8ffe9a241b88089ea7e313ee8b",
    "tokenizer.json": "57bcaa6bdd283ec6a80182d806776f10b8a1128bd37f9e012912c388ca12bae4",
    "tokenizer_config.json": "a312c78135a76984da63ae4488c31022c203c32e81732588722dda0ea8b752a6",
}
