# SPDX-License-Identifier: Apache-2.0
"""dllm_compile: a graph compiler and decoding runtime for masked-diffusion language models.

`optimize(model)` takes an unmodified model and returns an `OptimizedModel` with `generate`, `report` and
`dump_graphs`. Names are resolved on first use, so `import dllm_compile` costs little more than `import torch` and
touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors, models, passes, presets
    from .api import optimize
    from .bisection.findings import BisectResult
    from .bisection.run import bisect
    from .config import CompileConfig, DecodingConfig
    from .optimized import OptimizedModel
    from .remote_code import load_remote
    from .runtime.output import GenerationOutput

__version__ = "0.1.0"

__all__ = [
    "BisectResult",
    "CompileConfig",
    "DecodingConfig",
    "GenerationOutput",
    "OptimizedModel",
    "__version__",
    "bisect",
    "errors",
    "load_remote",
    "models",
    "optimize",
    "passes",
    "presets",
]

# Public name -> the module that defines it; None for a name that is a module itself.
_HOME: dict[str, str | None] = {
    "BisectResult": ".bisection.findings",
    "CompileConfig": ".config",
    "DecodingConfig": ".config",
    "GenerationOutput": ".runtime.output",
    "OptimizedModel": ".optimized",
    "bisect": ".bisection.run",
    "errors": None,
    "load_remote": ".remote_code",
    "models": None,
    "optimize": ".api",
    "passes": None,
    "presets": None,
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    if home is None:
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
