"""How much of a ring is read: all that was written and, while it fills, little more."""

import numpy as np
import onnx_ir as ir
import pytest
from sinkring.exporter.node import RingAttentionAttributes
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.ring_mask import read_step, write_reached
from sinkring.runtime.ring import RingGeometry

from tests.exporter.lowered_ring import check
from tests.exporter.ring_case import RingCase, session

GEOMETRIES = [(0, 8, 8), (4, 28, 32), (100, 20, 40), (4, 256, 320), (2, 1000, 1094)]


def reached_session(geometry: RingGeometry, rows: int) -> ir.Model:
    """A graph of `write_reached` alone: position int64 [B], tokens int64 [] -> int64 [1]."""
    position = ir.Value(name="position", shape=ir.Shape([rows]), type=ir.TensorType(ir.DataType.INT64))
    tokens = ir.Value(name="tokens", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    end = ir.node("Identity", [position])
    graph = ir.Graph([position, tokens], [], nodes=[end], opset_imports={"": 24}, name="reached")
    into = Insertion(graph, end)
    attributes = RingAttentionAttributes(geometry.sinks_tokens, geometry.window_tokens, geometry.slots, 1.0, "native")
    reached = write_reached(into, attributes, position, rows, tokens)
    into.commit()
    graph.remove(end)
    reached.name, reached.type, reached.shape = "reached", ir.TensorType(ir.DataType.INT64), ir.Shape([1])
    graph.outputs.append(reached)
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(("sinks", "window", "slots"), GEOMETRIES)
def test_every_slot_that_was_written_is_read(sinks: int, window: int, slots: int) -> None:
    geometry = RingGeometry(sinks, window, slots)
    run = session(reached_session(geometry, rows=1))
    step = read_step(geometry.capacity)
    for position in [*range(geometry.capacity + 5), 1 << 40]:
        for tokens in (1, 3):
            found = int(run.run(None, {"position": np.array([position]), "tokens": np.array(tokens)})[0][0])
            written = min(position + tokens, geometry.capacity)
            assert max(written, sinks) <= found <= geometry.capacity, (position, tokens)
            assert found < max(written, sinks) + step, (position, tokens)


def test_rows_of_different_ages_read_what_the_oldest_has() -> None:
    run = session(reached_session(RingGeometry(4, 28, 32), rows=3))
    assert run.run(None, {"position": np.array([5, 17, 0]), "tokens": np.array(2)})[0].tolist() == [20]
    assert run.run(None, {"position": np.array([5, 1 << 40, 0]), "tokens": np.array(2)})[0].tolist() == [36]


@pytest.mark.parametrize("policy", ["native", "streaming"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spare", [8, 1, 0])
def test_a_filling_ring_is_attended_to_in_whole(policy: str, batch: int, spare: int) -> None:
    """In steps of 4: against plain attention, from the starts of every case, which are young and old. With and without slots to spare."""
    check("heads", RingCase(2, 40, spare, None, batch=batch, policy=policy), [1, min(6, spare + 1)])
