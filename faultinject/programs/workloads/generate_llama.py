"""generate.py with a model in the shape of a Llama of 3 billion weights, in bfloat16 (6 GB)."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from faultinject.programs.workloads.generate import (
    BEAT,
    PER_STEP,
    PROMPT,
    UNIT,
    UNTIMED,
    Generation,
)

__all__ = ["BEAT", "PER_STEP", "UNIT", "UNTIMED", "start"]

WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = 3072, 8192, 28, 24, 8
VOCABULARY = 128256
NEW = 32


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=PROMPT + NEW,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    # Weights are made in the precision in which they stay.
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def start(seed: int, backend: str) -> Generation:
    return Generation(seed, llama, NEW)
