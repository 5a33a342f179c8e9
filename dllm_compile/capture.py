# SPDX-License-Identifier: Apache-2.0
"""From an unmodified module to one clean FX graph.

Non-strict `torch.export` followed by an *empty* decomposition table gives pre-dispatch ATen: flat, functional, equal on
every device, with `linear`, `silu` and `scaled_dot_product_attention` as single nodes and weights under their
checkpoint's names. The default table would break attention into matrix products and softmax.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from ._compat import hold_device_guard
from .alike_layers import MIN_LAYERS, NotAlike, find_repeated
from .certify import deviation
from .errors import CaptureError, UnsupportedModelError
from .export_gate import EXPORT_GATE
from .passes.graph import aten, check_metadata, fake_mode_of, find, lookup, output_node, placeholders
from .refusals import first_line, forward_logits, logits_of, refuse_backward_hooks, refuse_unsupported
from .stamping import stamp

# Neither dimension may be 1: export specialises sizes 0 and 1 and then refuses the dynamic dimension.
EXAMPLE_SHAPE = (2, 16)

_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        gm: graph of `ids [B, T] int64 -> logits [B, T, V]`; parameters are the source's own objects.
        source: the module that was captured (the inner model where a wrapper adds nothing).
        prefix: what to put before a parameter's name in `gm` to get its name in the user's model.
        layers: number of attention nodes, N.
        traced: layers that were traced; the others were stamped (`stamping.py`).
        whole: why all of them were traced; '' where they were not.
    """

    gm: GraphModule
    source: nn.Module
    prefix: str
    layers: int
    traced: int
    whole: str

    @property
    def note(self) -> str | None:
        """What the report says where a deep model could not be stamped."""
        if not self.whole or self.layers < MIN_LAYERS:
            return None
        return f"all {self.layers} layers were traced, which takes longer: {self.whole}"


def capture(model: nn.Module, max_length: int | None, vocab_size: int) -> Captured:
    """Export `model` for any batch size and any length up to `max_length`.

    Where many layers are alike, four are traced and the others stamped (`stamping.py`); the result is the same.

    Args:
        model: a module whose forward takes `input_ids` and returns logits (a tensor, or an output with `.logits`).
        max_length: longest sequence, usually the config's `max_sequence_length`; None leaves it to the model's tables.
        vocab_size: rows of the embedding table.

    Raises:
        UnsupportedModelError: the model is in a state that would be captured wrongly (train mode, autocast, meta
            device, compiled, quantised, sharded or adapter-wrapped layers, full backward hooks), its forward does not
            return logits of every position for ids alone, or they are not finite.
        DeviceMismatchError: parameters on several devices or of several floating dtypes.
        CaptureError: export failed, or the graph does not compute what the module does.
    """
    refuse_unsupported(model)
    if max_length is not None and max_length < 2:
        raise UnsupportedModelError(
            f"max_sequence_length={max_length} leaves nothing to attend to: it must be 2 or more"
        )
    rows, columns = EXAMPLE_SHAPE[0], min(EXAMPLE_SHAPE[1], max_length or EXAMPLE_SHAPE[1])
    ids = torch.arange(rows * columns, device=next(model.parameters()).device).reshape(rows, columns) % vocab_size
    with torch.no_grad():
        # Also moves rotary tables that follow the first forward and not `.to(device)`, which would be traced otherwise.
        source, prefix, expected = _inner(model, ids)
    refuse_backward_hooks(source)
    if not expected.isfinite().all():
        raise UnsupportedModelError(
            f"the logits of {type(model).__name__} are not finite: check the weights for NaN and infinity, or load "
            f"them in another dtype if {str(expected.dtype).removeprefix('torch.')} overflows"
        )
    gm = None
    try:
        gm, traced, whole = *_stamped(source, ids, max_length, expected), ""
    except NotAlike as reason:
        traced, whole = 0, str(reason)
    if gm is None:
        gm = _export(source, ids, max_length)
        _clean(gm, expected)
        if difference := _difference(gm, ids, expected):
            raise CaptureError(
                f"the captured graph of {type(source).__name__} differs from the module by {difference:.1e}; "
                "the module probably depends on something outside its inputs and parameters"
            )
    layers = len(find(gm, _ATTENTION))
    return Captured(gm, source, prefix, layers, traced or layers, whole)


def _stamped(source: nn.Module, ids: Tensor, max_length: int | None, expected: Tensor) -> tuple[GraphModule, int]:
    """The graph of `source` from a few of its layers, and how many those are.

    Raises:
        NotAlike: it must be captured whole.
    """
    repeated = find_repeated(source)
    try:
        shallow = _export(repeated.shallow(), ids, max_length)
        _clean(shallow, expected)
    except Exception as error:  # a forward that counts its layers, whatever it does about it
        raise NotAlike(f"a copy with fewer layers does not run ({type(error).__name__})") from error
    gm = stamp(shallow, repeated)
    check_metadata(gm, "stamping")
    if _difference(gm, ids, expected):
        raise NotAlike("layers that look alike do not compute alike")
    return gm, len(find(shallow, _ATTENTION))


def _difference(gm: GraphModule, ids: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of the graph's logits; 0.0 only where they are equal bit for bit."""
    with torch.no_grad():
        return deviation(expected, gm(ids))


def _inner(model: nn.Module, ids: Tensor) -> tuple[nn.Module, str, Tensor]:
    """The module to capture, its prefix, and its logits.

    It is the inner model where a wrapper owns no parameter and does nothing to the logits: fewer version-dependent
    lines are traced.
    """
    expected = forward_logits(model, ids)
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module) and {id(p) for p in inner.parameters()} == {id(p) for p in model.parameters()}:
        try:
            same = torch.equal(logits_of(inner(ids)), expected)
        except Exception:
            same = False  # what the inner module takes or returns is the wrapper's business
        if same:
            return inner, "model.", expected
    return model, "", expected


def _export(source: nn.Module, ids: Tensor, max_length: int | None) -> GraphModule:
    length = Dim.AUTO if max_length is None else Dim("length", min=1, max=max_length)
    dims = {0: Dim("batch", min=1, max=4096), 1: length}
    try:
        hold_device_guard()
        with EXPORT_GATE.exporting(), warnings.catch_warnings():
            # Deprecation notes of the exporter about its own tree specs: nothing a user can act on.
            warnings.simplefilter("ignore")
            # Guards become asserts in the graph, which are dropped: torch 2.11 cannot prove on a card that, for
            # every length T, min(64 T, 128 T) is 64 T, and would refuse the dynamic dimension for it.
            program = torch.export.export(
                source,
                (ids,),
                dynamic_shapes=(dims,),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            program = program.run_decompositions({})
            return program.module()  # type: ignore[return-value]
    except Exception as error:
        raise CaptureError(f"{type(source).__name__} could not be exported: {first_line(error)}") from error


# What export leaves behind to check at run time; the whole graph is compared with the module instead.
_ASSERTS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)


def _clean(gm: GraphModule, expected: Tensor) -> None:
    """Leave computation only: no asserts, no guards, no dropout copies, plain calling convention, logits alone."""
    graph = gm.graph
    for node in list(graph.nodes):
        if node.target in _ASSERTS or node.op == "call_module":
            graph.erase_node(node)
        elif node.target is aten.clone.default and _is_dropout(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    output = output_node(gm)
    found = (
        node
        for node in torch.utils._pytree.tree_leaves(output.args)
        if isinstance(node, Node) and node.meta["val"].dim() == 3 and node.meta["val"].shape[-1] == expected.shape[-1]
    )
    logits = next(found, None)
    if logits is None:
        raise CaptureError(
            f"the captured graph returns no logits of {expected.shape[-1]} tokens: what the forward returns must not "
            "depend on how it is called"
        )
    output.args = (logits,)
    # The exporter's generator flattens inputs by the old signature, and its hook enforces it.
    graph.set_codegen(CodeGen())
    gm._forward_pre_hooks.clear()
    graph.eliminate_dead_code()
    for node in placeholders(gm)[1:]:
        graph.erase_node(node)
    mode = fake_mode_of(gm)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(lookup(gm, str(node.target)), static_shapes=True)
    gm.recompile()
    check_metadata(gm, "capture")


def _is_dropout(node: Node) -> bool:
    """Whether a `clone` is what is left of a dropout in eval mode (one that keeps the strides)."""
    source: Node = node.args[0]  # type: ignore[assignment]
    return "memory_format" not in node.kwargs and node.meta["val"].stride() == source.meta["val"].stride()
