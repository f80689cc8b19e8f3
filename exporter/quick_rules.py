"""onnxscript's rewrite rules, each tried only at nodes of the operator that its pattern ends in.

By itself a set of rules tries every rule at every node, and a rule with two outputs goes through the whole graph for each: for a model of
thirty layers that takes a third of the time of its trace. What is rewritten, and in which order, stays the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
from onnxscript import rewriter


@contextmanager
def default_rules_at_their_operators() -> Iterator[None]:
    """Within the block `optimizer.optimize_ir` tries its rules so."""
    name = "_DEFAULT_REWRITE_RULES"
    if not hasattr(rewriter, name):  # another onnxscript may keep them elsewhere, and is slower for it
        yield
        return
    with patch.object(rewriter, name, rules_at_their_operators(getattr(rewriter, name))):
        yield


def rules_at_their_operators(rules: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_AtOperator(rule) for rule in rules)


class _AtOperator:
    """Stands for a rule: all is the rule's own but where it is tried."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        # Matching starts at the first of the nodes that make the pattern's outputs.
        identifier = rule._target_pattern.output_nodes[0].op_identifier()
        self._op_type: str | None = None if identifier is None else identifier[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        if self._op_type is not None and node.op_type != self._op_type:
            return None
        return self._rule.try_rewrite(model, graph, node, **options)
