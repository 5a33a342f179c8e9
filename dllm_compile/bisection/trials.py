# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of a canonical graph and says how far each is from the ground."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..passes import GraphPass, run_passes
from ..passes.graph import placeholders, share
from .cases import Call, Case
from .judging import logits_error, probability_error, tokens_error


class Trials:
    """The programs of one canonical graph.

    Args:
        canonical: the graph.
        cases: the programs and their calls.
        finish: passes that end every program.
        layers: N.
        mask_token_id: id of a masked position.
    """

    def __init__(
        self,
        canonical: GraphModule,
        cases: Sequence[Case],
        finish: tuple[GraphPass, ...],
        *,
        layers: int,
        mask_token_id: int,
    ) -> None:
        self.canonical = canonical
        self.cases = tuple(cases)
        self.finish = finish
        self._layers = layers
        self._mask_token_id = mask_token_id
        self._built: dict[str, GraphModule] = {}

    def build(self, name: str) -> GraphModule:
        """The finished graph of a program, made once."""
        if name not in self._built:
            gm = share(self.canonical)
            case = next(case for case in self.cases if case.name == name)
            run_passes(gm, (*case.passes, *self.finish), layers=self._layers)
            self._built[name] = gm
        return self._built[name]

    def stages(
        self, case: Case, more: tuple[GraphPass, ...] = ()
    ) -> Iterator[tuple[GraphPass, Callable[[], GraphModule]]]:
        """Each pass of a program, and what runs it on the graph so far; in order, every one of them."""
        gm = share(self.canonical)
        for graph_pass in (*case.passes, *self.finish, *more):

            def apply(graph_pass: GraphPass = graph_pass) -> GraphModule:
                run_passes(gm, (graph_pass,), layers=self._layers)
                return gm

            yield graph_pass, apply

    def error(self, case: Case, gm: GraphModule, program: Callable[..., object] | None = None) -> float | None:
        """The largest error of the calls of a case that a graph can answer; None: there is none.

        Args:
            case: what is called.
            gm: the graph, which may be on its way to being the program.
            program: what is called in its place: compiled code.
        """
        names = [str(node.target) for node in placeholders(gm)]
        calls = [call for call in case.calls(self.build) if call.needs in names]
        return max((self._judge(program or gm, names, call) for call in calls), default=None)

    def _judge(self, program: Callable[..., object], names: Sequence[str], call: Call) -> float:
        with torch.no_grad():
            out = program(**{name: call.inputs[name] for name in names})
        if isinstance(out, Tensor):
            wanted = len(out) != len(call.expected)
            return logits_error(call.expected[call.inputs["wanted"]] if wanted else call.expected, out)
        assert isinstance(out, tuple)
        expected = call.expected[call.inputs["wanted"]]
        error = tokens_error(expected, out[0], out[1], self._mask_token_id)
        return max([error, *(probability_error(expected, call.inputs["given"], one) for one in out[2:])])
