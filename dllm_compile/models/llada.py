# SPDX-License-Identifier: Apache-2.0
"""LLaDA as plain torch modules, independent of the transformers version.

Same state-dict names, same order of casts and same numbers as the released remote code, so that a released checkpoint
folder loads as it is. There is no key/value cache here: the package's compiled programs bring their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from dllm_compile.errors import PaddingError, PromptTooLongError, UnsupportedModelError
from dllm_compile.models.llada_config import LLaDAConfig

__all__ = ["LLaDAConfig", "LLaDAForMaskedDiffusion", "LLaDAModel"]


class LLaDARMSNorm(nn.Module):
    """Root-mean-square norm: fp32 inside, cast back, and only then the weight in the activation's dtype.

    With `layer_norm_type` "gemma_rms" the factor is 1 + weight.
    """

    def __init__(self, config: LLaDAConfig, size: int, affine: bool) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.unit_offset = config.layer_norm_type == "gemma_rms"
        start = 0.0 if self.unit_offset else 1.0
        self.weight = nn.Parameter(torch.full((size,), start)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` [..., size]; dtype kept."""
        x32 = x.to(torch.float32)
        normed = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        if self.weight is None:
            return normed
        scaled = normed * (1 + self.weight) if self.unit_offset else self.weight * normed
        return scaled if self.bias is None else scaled + self.bias


class LLaDARotaryEmbedding(nn.Module):
    """Rotary positions on half-split heads; the fp32 tables never change dtype, but follow the device."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.full_precision = config.rope_full_precision
        self._length, self._dim, self._theta = config.max_sequence_length, config.head_dim, config.rope_theta
        cos, sin = self._tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, 1, max_sequence_length, head_dim] on the CPU (also under a meta-device context)."""
        even = torch.arange(0, self._dim, 2, dtype=torch.float32, device="cpu")
        inverse = 1.0 / (self._theta ** (even / self._dim))
        angles = torch.arange(self._length, dtype=torch.float32, device="cpu")[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)[None, None]
        return angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LLaDARotaryEmbedding:
        """Let `.to(...)` move the tables but not round them: a changed table is made anew on the new device."""
        before = self.cos
        super()._apply(fn, recurse)
        after = self.cos
        if after is not before and after.device.type != "meta":
            self.cos, self.sin = (table.to(after.device) for table in self._tables())
        return self

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [B, H, T, hd] and k [B, Hkv, T, hd] by their positions 0 ... T-1; dtypes kept."""
        length = k.shape[-2]
        q_, k_ = (q.float(), k.float()) if self.full_precision else (q, k)
        sin = self.sin[:, :, :length].type_as(q_)
        cos = self.cos[:, :, :length].type_as(q_)
        return _rotated(q_, cos, sin).type_as(q), _rotated(k_, cos, sin).type_as(k)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.view(*x.shape[:-1], 2, x.shape[-1] // 2).unbind(-2)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LLaDABlock(nn.Module):
    """One pre-norm layer: bidirectional attention, then a gated SiLU feed-forward."""

    def __init__(self, config: LLaDAConfig, rotary_emb: LLaDARotaryEmbedding) -> None:
        super().__init__()
        width, kv_width, ffn = config.d_model, config.kv_heads * config.head_dim, config.ffn_size
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.kv_heads, config.head_dim
        self.q_norm: LLaDARMSNorm | None = None
        self.k_norm: LLaDARMSNorm | None = None
        if config.attention_layer_norm:
            self.q_norm = LLaDARMSNorm(config, width, config.attention_layer_norm_with_affine)
            self.k_norm = LLaDARMSNorm(config, kv_width, config.attention_layer_norm_with_affine)
        self.attn_norm = LLaDARMSNorm(config, width, config.layer_norm_with_affine)
        self.ff_norm = LLaDARMSNorm(config, width, config.layer_norm_with_affine)
        self.q_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.qkv_bias)
        self.attn_out = nn.Linear(width, width, bias=config.include_bias)
        self.ff_proj = nn.Linear(width, ffn, bias=config.include_bias)
        self.up_proj = nn.Linear(width, ffn, bias=config.include_bias)
        self.ff_out = nn.Linear(ffn, width, bias=config.include_bias)
        self.rotary_emb = rotary_emb

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of the normed stream x [B, T, C] to itself; mask [B, 1, T, T] bool, True = may be seen."""
        batch, length, width = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            dtype = k.dtype
            q, k = self.q_norm(q).to(dtype), self.k_norm(k).to(dtype)
        q = q.view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = k.view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = v.view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.rotary_emb(q, k)
        if self.kv_heads != self.heads:
            repeats = self.heads // self.kv_heads
            k = k.repeat_interleave(repeats, dim=1, output_size=self.heads)
            v = v.repeat_interleave(repeats, dim=1, output_size=self.heads)
        if mask is None:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.attn_out(attended.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One layer on the stream x [B, T, C]; dtype kept."""
        x = x + self.attention(self.attn_norm(x), mask)
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))


class LLaDAModel(nn.Module):
    """Embedding, layers, final norm and head: ids [B, T] to logits [B, T, V]."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.config = config
        # One set of tables for all layers: every block holds the same module.
        rotary_emb = LLaDARotaryEmbedding(config)
        blocks = [LLaDABlock(config, rotary_emb) for _ in range(config.n_layers)]
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.embedding_rows, config.d_model),
            "ln_f": LLaDARMSNorm(config, config.d_model, config.layer_norm_with_affine),
        }
        group = config.block_group_size
        if group > 1:
            groups = (nn.ModuleList(blocks[at : at + group]) for at in range(0, len(blocks), group))
            parts["block_groups"] = nn.ModuleList(groups)
        else:
            parts["blocks"] = nn.ModuleList(blocks)
        if not config.weight_tying:
            parts["ff_out"] = nn.Linear(config.d_model, config.embedding_rows, bias=config.include_bias)
        self.transformer = nn.ModuleDict(parts)

    @property
    def wte(self) -> nn.Embedding:
        """The embedding."""
        module = self.transformer["wte"]
        assert isinstance(module, nn.Embedding)
        return module

    def layers(self) -> Iterator[LLaDABlock]:
        """The layers in order, whether grouped or not."""
        for module in self.transformer.modules():
            if isinstance(module, LLaDABlock):
                yield module

    def reset_parameters(self, seed: int) -> None:
        """Draw fresh weights: normal with `init_std`, outputs of layers smaller by sqrt(2 n_layers), biases 0."""
        generator = torch.Generator().manual_seed(seed)
        std, depth = self.config.init_std, math.sqrt(2 * self.config.n_layers)
        with torch.no_grad():
            for name, module in self.named_modules():
                if not isinstance(module, nn.Linear | nn.Embedding):
                    continue
                residual = name.endswith("attn_out") or (name.endswith("ff_out") and name != "transformer.ff_out")
                drawn = torch.randn(module.weight.shape, generator=generator) * (std / depth if residual else std)
                module.weight.copy_(drawn)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> MaskedLMOutput:
        """Logits of every position.

        Args:
            input_ids: [B, T] int64, mask tokens included.
            attention_mask: [B, T], nonzero = real token. Pad positions are seen by no real position; their own rows
                are finite and mean nothing.

        Returns:
            An output whose `logits` are [B, T, V] in the parameters' dtype.

        Raises:
            PromptTooLongError: T exceeds `max_sequence_length`.
            PaddingError: the mask's shape is not that of the ids.
            UnsupportedModelError: train mode with a dropout probability above zero.
        """
        config = self.config
        # Not while exporting: the comparison would become a guard on the symbolic length.
        if not torch.compiler.is_compiling() and input_ids.shape[1] > config.max_sequence_length:
            raise PromptTooLongError(
                f"{input_ids.shape[1]} tokens exceed max_sequence_length={config.max_sequence_length}: "
                "shorten the prompt or generate fewer tokens"
            )
        if self.training and config.dropout > 0:
            raise UnsupportedModelError("dropout is not implemented: set the config's *_dropout to 0, or call eval()")
        mask = None if attention_mask is None else _visible(attention_mask, input_ids)
        x = self.wte(input_ids)
        if config.input_emb_norm:
            x = x * (config.d_model**0.5)
        for block in self.layers():
            x = block(x, mask)
        x = self.transformer["ln_f"](x)
        logits = F.linear(x, self.wte.weight) if config.weight_tying else self.transformer["ff_out"](x)
        if config.scale_logits:
            logits = logits * (1 / math.sqrt(config.d_model))
        return MaskedLMOutput(logits=logits)


def _visible(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """[B, 1, T, T] bool: real keys, and each position itself (so that no row is empty, hence none is NaN)."""
    if attention_mask.shape != input_ids.shape:
        raise PaddingError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}: "
            "give one 0/1 value a token"
        )
    itself = torch.eye(input_ids.shape[1], dtype=torch.bool, device=input_ids.device)
    return attention_mask.bool()[:, None, None, :] | itself


class LLaDAForMaskedDiffusion(nn.Module):
    """The whole model under the prefix `model.`, as in released checkpoints; loads and saves folders."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LLaDAModel(config)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.model.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self.model.wte.weight.dtype

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> MaskedLMOutput:
        """See `LLaDAModel.forward`."""
        return self.model(input_ids, attention_mask)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> LLaDAForMaskedDiffusion:
        """Load a folder of `config.json` and safetensors, in eval mode; see `checkpoint.load_checkpoint`."""
        from dllm_compile.models.checkpoint import load_checkpoint

        return load_checkpoint(path, dtype=dtype, device=device)

    def save_pretrained(self, path: str | os.PathLike[str], max_shard_bytes: int = 4 << 30) -> None:
        """Write a folder `from_pretrained` reads; see `checkpoint.save_checkpoint`."""
        from dllm_compile.models.checkpoint import save_checkpoint

        save_checkpoint(self, path, max_shard_bytes=max_shard_bytes)
