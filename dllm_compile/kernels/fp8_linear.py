# SPDX-License-Identifier: Apache-2.0
"""`dllm::fp8_linear`: product of FP8 codes with an FP8 weight, both with scales, the kernel chosen by the row count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_compile.kernels.fp8_format import FP8, GROUP, dequantize, library_weight_scales
from dllm_compile.kernels.fp8_support import has_fp8, library_of

_LIBRARY_ROWS = 4  # the block-scaled library product takes multiples of this many rows


def fp8_linear_reference(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """`dequantize(codes, scales) @ dequantize(weight_codes, weight_scales).T` in fp32, rounded to `dtype` at the end.

    The grouping is read off the shapes of the scales; the table is in `fp8_format`. A kernel differs from this by the
    order of the fp32 sums, and by the accumulation of FP8 tensor cores within 128 terms (about 1e-4 of a row's norm).

    Args:
        codes: [M, K] float8_e4m3fn; rows have stride 1.
        scales: fp32, [M, K/128] with strides (1, M) (other strides cost a copy), or [M, 1], or [1, 1].
        weight_codes: [N, K] float8_e4m3fn, contiguous and unpacked, as torchao's `Float8Tensor.qdata`.
        weight_scales: fp32, [N/128, K/128], or [N, 1], or [1, 1], as torchao's `Float8Tensor.scale`. The library
            product reads [N/128, K/128] in place if its rows lie a multiple of 4 numbers apart: contiguous for
            K = 512 n, else as `fp8_format.padded_weight_scales` lays them out; otherwise they are copied in every call.
            In torch's terms it is the transpose that has strides (1, multiple of 4): no other argument is needed.
        dtype: of the result.

    Returns:
        [M, N], `dtype`, contiguous.
    """
    return F.linear(dequantize(codes, scales), dequantize(weight_codes, weight_scales)).to(dtype)


def check_fp8_linear(op: str, codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> bool:
    """Raise ValueError or TypeError unless codes and scales belong together; return whether groups are 128 wide."""
    if codes.ndim != 2 or weight_codes.ndim != 2 or codes.shape[1] != weight_codes.shape[1]:
        raise ValueError(
            f"{op}: codes must be [M, K] and weight_codes [N, K], got {[*codes.shape]} and {[*weight_codes.shape]}"
        )
    if codes.dtype != FP8 or weight_codes.dtype != FP8:
        raise TypeError(f"{op}: codes must be float8_e4m3fn, got {codes.dtype} and {weight_codes.dtype}")
    if scales.dtype != torch.float32 or weight_scales.dtype != torch.float32:
        raise TypeError(f"{op}: scales must be fp32, got {scales.dtype} and {weight_scales.dtype}")
    (rows, width), outs = codes.shape, weight_codes.shape[0]
    of_x, of_weight = tuple(scales.shape), tuple(weight_scales.shape)
    whole = width % GROUP == 0 and outs % GROUP == 0
    if whole and of_x == (rows, width // GROUP) and of_weight == (outs // GROUP, width // GROUP):
        return True
    if (of_x, of_weight) in (((rows, 1), (outs, 1)), ((1, 1), (1, 1))):
        return False
    raise ValueError(
        f"{op}: scales {[*of_x]} and {[*of_weight]} fit codes {[*codes.shape]} and {[*weight_codes.shape]} in no "
        "grouping: 128 wide (K and N multiples of 128), a row, or the tensor"
    )


@torch.library.custom_op("dllm::fp8_linear", mutates_args=())
def fp8_linear(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """See `fp8_linear_reference`."""
    check_fp8_linear("fp8_linear", codes, scales, weight_codes, weight_scales)
    return fp8_linear_reference(codes, scales, weight_codes, weight_scales, dtype)


@fp8_linear.register_fake
def _(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], weight_codes.shape[0]), dtype=dtype)


@fp8_linear.register_kernel("cuda")
def _(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    check_fp8_linear("fp8_linear", codes, scales, weight_codes, weight_scales)
    return fp8_linear_cuda(codes, scales, weight_codes, weight_scales, dtype)


def fp8_linear_cuda(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """The product on a CUDA device by the route that is fastest for its shape; arguments as in the reference."""
    grouped = check_fp8_linear("fp8_linear", codes, scales, weight_codes, weight_scales)
    if not has_fp8(codes.device) or codes.numel() == 0:
        return fp8_linear_reference(codes, scales, weight_codes, weight_scales, dtype)
    with torch.cuda.device(codes.device):  # Triton launches on the current device
        if not grouped:
            if dtype != torch.bfloat16 or weight_codes.shape[0] % 16 != 0 or weight_codes.shape[1] % 16 != 0:
                return fp8_linear_reference(codes, scales, weight_codes, weight_scales, dtype)
            return torch._scaled_mm(codes, weight_codes.t(), scales, weight_scales.t(), out_dtype=dtype)
        library = library_of(codes.device)
        if library == "none":
            return fp8_linear_reference(codes, scales, weight_codes, weight_scales, dtype)
        from dllm_compile.kernels import fp8_linear_triton as triton_version

        tiling = triton_version.choose_tiling(codes.shape[0], *weight_codes.shape)
        if tiling is None and dtype == torch.bfloat16 and library == "scaled_mm":
            return block_scaled_mm(codes, scales, weight_codes, weight_scales)
        if tiling is None and dtype == torch.bfloat16 and library == "torchao":
            from torchao.kernel.blockwise_quantization import blockwise_fp8_gemm

            return blockwise_fp8_gemm(codes, scales.contiguous(), weight_codes, weight_scales.contiguous(), GROUP)
        tiling = tiling or triton_version.ANY_ROWS
        return triton_version.fp8_linear_triton(codes, scales, weight_codes, weight_scales, dtype, tiling)


def block_scaled_mm(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
    """Product by torch with 1 x 128 and 128 x 128 scales (SM90), bf16; rows are padded to a multiple of 4."""
    rows, width = codes.shape
    padding = -rows % _LIBRARY_ROWS
    if padding:
        padded = codes.new_empty((rows + padding, width))
        padded[:rows] = codes
        padded_scales = scales.new_empty((scales.shape[1], rows + padding)).t()
        padded_scales[:rows] = scales
        # Whatever the rows of padding hold stays in rows that are cut off.
        codes, scales = padded, padded_scales
    elif scales.stride() != (1, rows):
        scales = scales.t().contiguous().t()
    product = F.scaled_mm(
        codes,
        weight_codes.t(),
        scales,
        F.ScalingType.BlockWise1x128,
        library_weight_scales(weight_scales),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:rows] if padding else product
