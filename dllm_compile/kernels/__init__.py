# SPDX-License-Identifier: Apache-2.0
"""Operators of the `dllm::` namespace, one a file: torch reference, registration, Triton kernel.

Importing this package registers each operator once; names are global in a process.
"""

from . import attention, embed, head, head_confidence, rms_norm, rope, row_attention, swiglu

__all__ = ["attention", "embed", "head", "head_confidence", "rms_norm", "rope", "row_attention", "swiglu"]
