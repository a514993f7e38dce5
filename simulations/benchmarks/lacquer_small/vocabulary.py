"""The byte-level BPE tokenizer of ``lacquer-small``.

Every digit is a token of its own, so that a number of six digits has six tokens and the exposure of a secret number can
be computed exactly over all numbers of that length. ``<unk>``, which WikiText-2 writes for rare words, is one token.
"""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train(texts: Iterable[str], size: int, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries; ``<s>`` goes in front of every text, nothing behind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin, end = SPECIAL["bos_token"], SPECIAL["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {end} $B",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, model_max_length=context, **SPECIAL)
    return fast
