"""One weights file that all graphs of a bundle share, as ONNX external data.

Tensors are told apart by content, not by name: the same weight in two graphs is stored once, whatever each graph calls it.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

# Small tensors stay inside the graph. Offsets are multiples of a page, so that a runtime can map each tensor straight from the file.
INLINE_LIMIT_BYTES = 4096
ALIGNMENT_BYTES = 4096


@dataclass
class WeightsFile:
    """Open for writing while graphs are saved next to it. Use as a context manager."""

    path: Path
    _offsets: dict[tuple[str, str], int] = field(default_factory=dict)
    _file: BinaryIO | None = None

    def __enter__(self) -> "WeightsFile":
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def save_graph(self, model: ir.Model, path: Path) -> None:
        """Write `model` to `path`, its large tensors to this file. The model's own tensors are left as they are."""
        assert path.parent == self.path.parent, "external data is found relative to the graph"
        kept = {name: value.const_value for name, value in model.graph.initializers.items()}
        try:
            for name, value in model.graph.initializers.items():
                assert value.const_value is not None
                if value.const_value.nbytes > INLINE_LIMIT_BYTES:
                    value.const_value = self._store(name, value.const_value)
            ir.save(model, path)
        finally:
            for name, value in model.graph.initializers.items():
                value.const_value = kept[name]

    def _store(self, name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        assert self._file is not None
        # Of 4-bit numbers two are packed in a byte, which numpy has no type for.
        packed = tensor.dtype.bitwidth < 8
        data = memoryview(tensor.tobytes() if packed else tensor.numpy().reshape(-1).view("uint8"))  # type: ignore[arg-type]
        key = (hashlib.sha256(data).hexdigest(), str(tensor.dtype))
        if key not in self._offsets:
            self._file.seek(-self._file.tell() % ALIGNMENT_BYTES, 1)
            self._offsets[key] = self._file.tell()
            self._file.write(data)
        return ir.ExternalTensor(
            self.path.name,
            offset=self._offsets[key],
            length=len(data),
            dtype=tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=name,
            base_dir=self.path.parent,
        )
