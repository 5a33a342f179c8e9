# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet. Each message says what happened and what to do next."""

from __future__ import annotations


class DllmCompileError(Exception):
    """Base class: catch this to catch everything the package raises on purpose."""


class CaptureError(DllmCompileError):
    """The model could not be turned into one clean graph."""


class UnsupportedModelError(CaptureError):
    """The model, or the state it is in, is outside what is supported (names the module and the reason)."""


class PassError(DllmCompileError):
    """A required pass matched fewer regions than the model's layer count asks for."""


class CertificateError(PassError):
    """A rewritten region does not compute what the original computes."""


class ConfigError(DllmCompileError, ValueError):
    """A configuration contradicts itself or holds a value outside its range."""


class UnknownOptionError(ConfigError):
    """A keyword that is no field of the configuration."""


class PromptError(DllmCompileError, ValueError):
    """The prompts cannot be decoded as given (base class of the cases below)."""


class EmptyPromptError(PromptError):
    """A prompt has no tokens."""


class PromptTooLongError(PromptError):
    """Prompt plus new tokens exceed the model's `max_sequence_length`."""


class PaddingError(PromptError):
    """An attention mask whose padding is not all on one side, or whose shape does not fit the ids."""


class MaskTokenError(PromptError):
    """The mask token id is missing, clashes with another id, or stands in a prompt without `infill=True`."""


class DeviceMismatchError(DllmCompileError, ValueError):
    """Parameters, prompts or tables lie on different devices or have mixed dtypes."""


class UnknownShapeError(DllmCompileError):
    """After the warm-up a step has a size that was not captured, and `new_shapes="raise"` was asked for."""


class StaleWeightsError(DllmCompileError, RuntimeError):
    """Parameters were replaced after `optimize`, or updated while FP8 copies of them are in use: old values."""


class ReleasedWeightsError(DllmCompileError, RuntimeError):
    """High-precision weights are needed that `optimize(model, release=True)` freed: load the model again."""


class MissingPackageError(DllmCompileError, ImportError):
    """An optional package is needed for what was asked; the message says how to install it."""


class CopyError(DllmCompileError, TypeError):
    """An optimized model was to be copied or pickled; only the model it was made of can be."""


class CheckpointError(DllmCompileError, OSError):
    """A checkpoint folder is incomplete or does not describe a model that can be loaded."""


class DumpError(DllmCompileError, OSError):
    """The folder given to `dump_graphs` cannot be written to, or holds files of others under the dump's names."""
