"""The kernels of an engine, read from the text in which a TensorRT builder lists its fused plan.

With detailed profiling verbosity the builder ends its log with one line a kernel (the engine inspector's one-line form is the same):

    Name: __myl_Scat_myl0_4, LayerType: kgen, Inputs: [ { Name: cache.0.k.updated, Dimensions: [1,3,256,64], ..., Datatype: Float, ...}],
    Constants: [...], Outputs: [...], TacticName: ..., StreamId: 0, Metadata: [ONNX Layer: node_1][ONNX Layer: node_2]

Pure functions of text: no TensorRT, no GPU.
"""

import re
from dataclasses import dataclass
from math import prod

from sinkring.runtime.errors import BuildError

DATATYPE_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Int64": 8, "Int32": 4, "Int8": 1, "UInt8": 1, "Bool": 1, "FP8": 1}

_TENSORS = r"\[((?:\s*\{[^{}]*\},?)*)\s*\]"
_KERNEL = re.compile(
    rf"^\s*Name: (?P<name>.+?), LayerType: (?P<kind>[^,]+), "
    rf"Inputs: {_TENSORS}, (?:Constants: {_TENSORS}, )?Outputs: {_TENSORS}(?P<rest>.*)$"
)
_TENSOR = re.compile(r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dims>[^\]]*)\](?P<rest>[^{}]*)")
_DATATYPE = re.compile(r"Datatype: (\w+)")
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_MEMORY = re.compile(r"^(?P<what>Max Scratch|Total Activation|Total Weights) Memory: (?P<bytes>\d+) bytes", re.MULTILINE)


@dataclass(frozen=True)
class PlanTensor:
    """A tensor that a kernel reads or writes. A dimension that changes from call to call is -1."""

    name: str
    shape: tuple[int, ...]
    datatype: str

    @property
    def elements(self) -> int | None:
        """None while a dimension is dynamic."""
        return None if any(size < 0 for size in self.shape) else prod(self.shape)

    @property
    def bytes(self) -> int | None:
        elements = self.elements
        return None if elements is None else elements * DATATYPE_BYTES.get(self.datatype, 4)


@dataclass(frozen=True)
class Kernel:
    """One kernel of the plan in execution order; `nodes` are the ONNX nodes that went into it."""

    name: str
    kind: str
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    nodes: tuple[str, ...]

    @property
    def fused_attention(self) -> bool:
        """One kernel from query to result: `_gemv_mha_v1` for one query, `_gemm_mha_v2` for several."""
        return "_mha_" in self.name

    @property
    def multiplies(self) -> bool:
        """A matrix product: what it writes is computed from its operands, never a copy of one."""
        return self.kind == "gemm" or self.fused_attention or self.name.startswith("__myl_Fc")

    @property
    def sums_products(self) -> bool:
        """A product written as Mul and ReduceSum, which the builder fuses with what stands around it, copies too."""
        return self.kind == "kgen" and "MulSum" in self.name


def read_kernels(text: str) -> tuple[Kernel, ...]:
    """Every kernel listed in a builder's log or an inspector's one-line report, in order. Empty when the text lists none.

    Raises BuildError for a line that looks like a kernel and cannot be read: a kernel passed over could be the one that copies a cache.
    """
    kernels = []
    for line in text.splitlines():
        if not line.lstrip().startswith("Name: ") or ", LayerType: " not in line:
            continue
        found = _KERNEL.match(line)
        if found is None:
            raise BuildError(
                f"the builder's plan has a line of unknown form: {line.strip()[:200]!r}; use a TensorRT version that is supported"
            )
        kernels.append(
            Kernel(
                name=found["name"],
                kind=found["kind"],
                inputs=_tensors(found[3]),
                outputs=_tensors(found[5]),
                nodes=tuple(_ONNX_NODE.findall(found["rest"])),
            )
        )
    return tuple(kernels)


def read_scratch_bytes(text: str) -> int | None:
    """Device memory that an execution needs beside weights and bindings, in bytes; None when the log does not say."""
    return _memory(text, "Total Activation")


def read_weight_bytes(text: str) -> int | None:
    """Device memory of the weights, in bytes; None when the log does not say."""
    return _memory(text, "Total Weights")


def _memory(text: str, what: str) -> int | None:
    sizes = [int(found["bytes"]) for found in _MEMORY.finditer(text) if found["what"] == what]
    return max(sizes, default=None)


def _tensors(text: str) -> tuple[PlanTensor, ...]:
    tensors = []
    for found in _TENSOR.finditer(text):
        dims = found["dims"].strip()
        datatype = _DATATYPE.search(found["rest"])
        shape = tuple(int(size) for size in dims.split(",")) if dims else ()
        tensors.append(PlanTensor(found["name"], shape, datatype[1] if datatype else ""))
    return tuple(tensors)
