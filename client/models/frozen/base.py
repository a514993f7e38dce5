"""The form in which the frozen base model is held and run: part of ``[engine]``, and of what nodes are sent."""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from client.models.devices import LEAST_TOKENS, activation_bytes, choose_device, refuse_too_large, weight_bytes
from client.settings import Table

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class FrozenBase(Table):
    """The place of the frozen model, its bits, and what of a forward pass is kept.

    Attributes:
        device: device of the model; ``auto`` takes a CUDA device that torch can use, or the CPU where there is no CUDA
            device, and refuses one that torch cannot use.
        precision: precision of the products with frozen weights, see docs/engine.md; ``bf16`` is float32 on a processor
            that has no bfloat16 products. ``bf16-model`` also loads the weights in bfloat16.
        quantisation: quantisation of the blocks' weights, see docs/engine.md.
        checkpoint_blocks: recomputation of each block in the backward pass: less memory for about a third more time, to
            the same numbers.
        attention: attention implementation of transformers; ``flash_attention_2`` needs a GPU and its package.
            `"eager"` is not offered: its softmax rounds a short record by the records beside it.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "bf16-model"] = "auto"
    quantisation: Literal["none", "int8", "nf4"] = "none"
    checkpoint_blocks: bool = False
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"

    @model_validator(mode="after")
    def _flash_is_for_narrow_numbers_on_gpus(self) -> "FrozenBase":
        if self.attention == "flash_attention_2" and (self.precision != "bf16-model" or self.device == "cpu"):
            raise ValueError(
                "attention = 'flash_attention_2' computes in bfloat16 on a GPU only: it needs "
                "engine.precision = 'bf16-model' and a device that is not 'cpu'; take attention = 'sdpa'"
            )
        return self

    def chosen_device(self) -> str:
        """``"cuda"`` or ``"cpu"`` here; ValueError where that, or the attention, cannot be had."""
        device = choose_device(self.device)
        if self.attention == "flash_attention_2":
            missing = "there is no GPU here" if device == "cpu" else None
            if importlib.util.find_spec("flash_attn") is None:
                missing = "the package flash-attn is not installed"
            if missing:
                raise ValueError(f"engine.attention = 'flash_attention_2': {missing}; set engine.attention = 'sdpa'")
        return device

    def refuse_unfit(self, model: "nn.Module", device: str, tokens: int, *, plain: bool = False) -> None:
        """Raise ValueError where the model has no weights to quantise, or it and a micro-batch do not fit the GPU.

        Args:
            tokens: of a micro-batch; 0 takes the smallest that is chosen automatically.
            plain: PEFT trains it, which holds rounded weights in full width.
        """
        import torch

        from client.models.frozen.quantised import refuse_ternary

        if self.quantisation != "none":
            refuse_ternary(model)
        if device == "cuda":
            tokens = tokens or LEAST_TOKENS
            kept = activation_bytes(model, tokens, value=self.dtype.itemsize, checkpoint_blocks=self.checkpoint_blocks)
            held = weight_bytes(model, "none" if plain else self.quantisation)
            refuse_too_large(held, kept, torch.cuda.mem_get_info()[0], tokens)

    @property
    def dtype(self) -> "torch.dtype":
        """The type of the weights as they are loaded."""
        import torch

        return torch.bfloat16 if self.precision == "bf16-model" else torch.float32

    def load(self, name: str, task: str, num_labels: int | None = None) -> "tuple[nn.Module, PreTrainedTokenizerBase]":
        """Load a model by :func:`client.models.base.load_base` on the CPU, in this dtype, with this attention.

        Not yet quantised.
        """
        from client.models.base import (  # it loads torch and transformers, which settings do without
            ATTENTION,
            load_base,
        )

        model, tokenizer = load_base(name, task, num_labels, attention=ATTENTION, dtype=self.dtype)
        for module in model.modules():  # now, because loading runs the model on the CPU
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == ATTENTION:
                config._attn_implementation = self.attention
        return model, tokenizer

    def load_rounded(
        self, name: str, task: str, num_labels: int | None = None
    ) -> "tuple[nn.Module, PreTrainedTokenizerBase]":
        """Load as :meth:`load` does, with weights rounded as quantisation rounds them: the model that adapters are
        trained on.
        """
        from client.models.frozen.quantised import round_blocks

        model, tokenizer = self.load(name, task, num_labels)
        round_blocks(model, self.quantisation)
        return model, tokenizer
