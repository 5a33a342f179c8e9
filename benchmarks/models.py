# SPDX-License-Identifier: Apache-2.0
"""Random models of a real shape: speed does not depend on what the weights say."""

from __future__ import annotations

import torch

from dllm_compile.models import LLaDAConfig, LLaDAForMaskedDiffusion

SHAPES = {
    "8b": {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464},
    "tiny": {"d_model": 128, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 256, "vocab_size": 512},
}


def random_llada(shape: str, layers: int, device: str, **changes: int) -> LLaDAForMaskedDiffusion:
    """A LLaDA of `SHAPES[shape]` and `changes` with normal weights (std 0.02): bf16 on a card, fp32 on the CPU."""
    sizes = {**SHAPES[shape], **changes}
    mask = sizes["vocab_size"] - 1
    config = LLaDAConfig(
        **sizes,
        n_layers=layers,
        embedding_size=sizes["vocab_size"],
        max_sequence_length=8192,
        mask_token_id=mask,
        eos_token_id=mask - 1,
        pad_token_id=mask - 1,
        weight_tying=False,
        rope_theta=500000.0,
        layer_norm_type="rms",
        activation_type="silu",
        block_type="llama",
        include_bias=False,
        include_qkv_bias=False,
        rope=True,
        rope_full_precision=True,
        rms_norm_eps=1e-5,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        torch.set_default_dtype(dtype)
        try:
            model = LLaDAForMaskedDiffusion(config)
        finally:
            torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
    return model.to(device).eval()
