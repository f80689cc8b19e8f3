"""What torch's exporter does over and over while it traces, done once: nothing of what it makes is changed by it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_trace() -> Iterator[None]:
    """Within the block torch's table of operators is made once in the life of the process, and no garbage is looked for.

    Both take a good part of a trace: the table is read from the sources of its functions, and a trace makes so many objects that the
    collector goes through all of torch's and transformers' again and again. What it would have freed it frees after the block.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with _one_table():
            yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _one_table() -> Iterator[None]:
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another torch may keep it elsewhere, and is slower for it
        yield
        return
    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(_table_of(ONNXRegistry))):
        yield


@cache
def _table_of(registry: Any) -> Any:
    """What makes the table, which makes it when it is first called. The exporter only reads it."""
    return cache(registry.from_torchlib)
