"""A bundle on one NVIDIA GPU, whatever runs its graphs there: TensorRT, TensorRT-RTX or ONNX Runtime.

All memory is allocated at opening: state, inputs, outputs, and the scratch that both programs share, since they run one after the other.
Each cache is bound as input and as output at the one address, and the prefill program to one row's slice of it. A decode step is one
captured CUDA graph where the program can be captured: inputs from pinned host memory, the program, logits to pinned host memory.
A program that only reads the caches has its new rows copied into them behind it (see device_rows).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends.cuda import Device, aligned
from sinkring.runtime.backends.device_inputs import DeviceInputs
from sinkring.runtime.backends.device_rows import DeviceRows
from sinkring.runtime.backends.device_states import DeviceStates
from sinkring.runtime.backends.token_loop import TokenLoop
from sinkring.runtime.contract import NEXT_TOKEN
from sinkring.runtime.device_sampling import GREEDY, SAMPLING_INPUTS
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Manifest, Ring, Role, Update


class Program(Protocol):
    """One graph, ready to run on the device's stream. scratch_bytes: device memory that it needs while it runs, from outside."""

    path: str
    scratch_bytes: int
    most_top_k: int  # as a Backend's; above 0 it has the output `next_token`, above 1 the inputs of device_sampling as well
    update: Update  # how the caches get their new rows

    def use_scratch(self, address: int, size_bytes: int) -> None: ...

    def bind(self, name: str, address: int) -> None:
        """Where a tensor, input or output, lies on the device."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """The shape of an input whose size varies, for the runs to come."""

    def enqueue(self) -> None:
        """Put one run on the device's stream."""

    def capturable(self) -> bool:
        """Whether a run can be captured as a CUDA graph."""
        ...

    def close(self) -> None: ...


class DeviceBackend:
    """See Backend. load makes the program of a role; capture: whether a decode step is captured, else it is enqueued each time.

    Takes the device over: it is closed with the backend, also when opening fails. Raises what `load` raises, BundleError for a program
    that cannot be captured, DeviceError when the GPU's memory does not suffice.
    """

    def __init__(self, name: str, manifest: Manifest, device: Device, load: Callable[[Role], Program], capture: bool) -> None:
        self.name = name
        self.device = device.name
        self.most_top_k = 0
        self._manifest = manifest
        self._device = device
        self._programs: list[Program] = []
        try:
            self._open(load, capture)
        except BaseException:
            self.close()
            raise

    def decode(self, idle: Sequence[int] = ()) -> None:
        for ring, index in zip(self._manifest.rings, self.write_index, strict=True):
            _check_room(ring, index, 1)
        kept = idle if self._decode_rows is None else ()
        if kept:
            self._states.keep(kept, self.write_index)
        if self._graph is None:
            self._step()
        else:
            self._device.launch(self._graph)
        if kept:
            self._states.put_back(kept, self.write_index)
        if self._decode_rows is not None:
            for row in range(self._manifest.batch):
                if row not in idle:
                    self._decode_rows.write_step(row, [int(index[row]) for index in self.write_index])
        self._device.synchronize()

    def extend(self, inputs: dict[str, NDArray[np.int64]], idle: Sequence[int] = ()) -> NDArray[np.int64]:
        """n steps from `input` on, each fed the token that the one before picked. Only where most_top_k is above 0.

        inputs: see Backend; those of a row in `idle` are the same in each step, and its state is afterwards what it was before. Returns the
        tokens that were picked, int64 [n,B]; `logits` are the last step's.
        """
        assert self._loop is not None, f"{self._decode.path}: picks no tokens"
        for ring in self._manifest.rings:
            for index in inputs[ring.write_index]:
                _check_room(ring, index, 1)
        kept = tuple(inputs[ring.write_index][0] for ring in self._manifest.rings)
        if idle:
            self._states.keep(idle, kept)
        picked = self._loop.run(self.input, inputs)
        if idle:
            self._states.put_back(idle, kept)
        self._device.copy_out(self.logits, self._logits_address)
        self._device.synchronize()
        return picked

    def prefill(self, row: int, fed: NDArray[Any], position: int, write_index: tuple[int, ...], wanted: int) -> NDArray[np.float32]:
        count = len(fed)
        # An engine's profile has one row at least.
        computed = max(1, wanted)
        inputs = self._prefill_inputs
        name = self._manifest.input_name
        inputs.host[name][0, :count] = fed
        inputs.host["rows"][:computed] = np.arange(count - computed, count)
        inputs.host["position"][0] = position
        for ring, index in zip(self._manifest.rings, write_index, strict=True):
            inputs.host[ring.write_index][0] = index
            _check_room(ring, inputs.host[ring.write_index], count)
        self._bind_row(row)
        self._prefill.set_shape(name, (1, count, *self._manifest.input_row))
        self._prefill.set_shape("rows", (computed,))
        inputs.upload()
        self._prefill.enqueue()
        if self._prefill_rows is not None:
            self._prefill_rows.write_chunk(row, count, write_index)
        if wanted:
            self._device.copy_out(self._chunk_logits[:wanted], self._logits_address)
        self._device.synchronize()
        return self._chunk_logits[:wanted]

    def read_row(self, row: int) -> dict[str, NDArray[Any]]:
        return self._states.read_row(row)

    def write_row(self, row: int, state: dict[str, NDArray[Any]]) -> None:
        self._states.write_row(row, state)

    def reset_row(self, row: int) -> None:
        self._states.reset_row(row)

    def addresses(self) -> dict[str, int]:
        return self._states.addresses()

    def close(self) -> None:
        while self._programs:
            self._programs.pop().close()
        self._device.close()

    def _open(self, load: Callable[[Role], Program], capture: bool) -> None:
        manifest, device = self._manifest, self._device
        batch, chunk, vocab = manifest.batch, manifest.chunk, manifest.model.vocab_size
        roles: tuple[Role, ...] = ("decode", "prefill")
        for role in roles:
            self._programs.append(load(role))
        self._decode, self._prefill = self._programs
        self._states = DeviceStates(device, manifest)
        indices = [ring.write_index for ring in manifest.rings]
        sampled = dict.fromkeys(SAMPLING_INPUTS, (batch,)) if self._decode.most_top_k > 1 else {}
        name, dtype, row = manifest.input_name, manifest.input_dtype, manifest.input_row
        self._decode_inputs = DeviceInputs(
            device, {name: (batch, 1, *row), "position": (batch,), **dict.fromkeys(indices, (batch,)), **sampled}, dtype
        )
        for said in sampled:
            self._decode_inputs.host[said][:] = GREEDY[said]
        self._prefill_inputs = DeviceInputs(
            device, {name: (1, chunk, *row), "rows": (chunk,), "position": (1,), **dict.fromkeys(indices, (1,))}, dtype
        )
        self.input, self.position = self._decode_inputs.host[name], self._decode_inputs.host["position"]
        self.write_index = tuple(self._decode_inputs.host[name] for name in indices)
        self.logits = device.pinned((batch, 1, vocab), np.float32)
        self._chunk_logits = device.pinned((chunk, vocab), np.float32)
        # One for both engines: what a run leaves there has been copied out before the next begins.
        self._logits_address = device.allocate(max(self.logits.nbytes, self._chunk_logits.nbytes), "logits")
        scratch_bytes = aligned(max(program.scratch_bytes for program in self._programs))
        scratch = device.allocate(scratch_bytes, "scratch")
        for program, inputs in ((self._decode, self._decode_inputs), (self._prefill, self._prefill_inputs)):
            program.use_scratch(scratch, scratch_bytes)
            for name, address in inputs.addresses.items():
                program.bind(name, address)
            program.bind("logits", self._logits_address)
        self._decode_rows = self._rows_of(self._decode, batch, 1)
        self._prefill_rows = self._rows_of(self._prefill, 1, chunk)
        self._bind_states(self._decode, 0)
        picked = device.allocate(8 * batch, "next_token") if self._decode.most_top_k else None
        if picked is not None:
            self._decode.bind(NEXT_TOKEN, picked)
        self._bound_row: int | None = None
        self._warm_up(capture, picked)

    def _rows_of(self, program: Program, rows: int, tokens: int) -> DeviceRows | None:
        """Where a program that only reads the caches puts its new rows."""
        if program.update == "in_place":
            return None
        new = DeviceRows(self._device, self._states, rows, tokens)
        for name, address in new.addresses.items():
            program.bind(name, address)
        return new

    def _bind_states(self, program: Program, row: int) -> None:
        for state in self._manifest.states:
            for name in (state.name, state.updated) if program.update == "in_place" else (state.name,):
                program.bind(name, self._states.row_address(state, row))

    def _warm_up(self, capture: bool, picked: int | None) -> None:
        """Run everything once, then capture a step: a program allocates in its first run, which a capture does not allow."""
        self._graph: Any = None
        self._loop: TokenLoop | None = None
        for row in range(self._manifest.batch):
            self._states.reset_row(row)
        empty = np.zeros((self._manifest.chunk, *self._manifest.input_row), self._manifest.input_dtype)
        self.prefill(0, empty, 0, (0,) * len(self._manifest.rings), 1)
        self._step()
        self._device.synchronize()
        if capture:
            if not self._decode.capturable():
                raise BundleError(f"{self._decode.path}: cannot be captured as a CUDA graph; build it again, or open with cuda_graph=False")
            self._graph = self._device.capture(self._step)
            # What it picks is a token id, which graphs that take embedded rows can't be fed. A captured step would write its new rows to
            # one slot for ever.
            if picked is not None and self._manifest.embedding is None and self._decode_rows is None:
                self.most_top_k = self._decode.most_top_k
                self._loop = TokenLoop(self._device, self._decode, self._decode_inputs, picked)
        # The warm-up wrote to the caches.
        for row in range(self._manifest.batch):
            self._states.reset_row(row)

    def _step(self) -> None:
        self._decode_inputs.upload()
        self._decode.enqueue()
        self._device.copy_out(self.logits, self._logits_address)

    def _bind_row(self, row: int) -> None:
        if row == self._bound_row:
            return
        self._bound_row = None
        self._bind_states(self._prefill, row)
        self._bound_row = row


def _check_room(ring: Ring, write_index: NDArray[np.int64], tokens: int) -> None:
    """Raises InputError for a write that runs past the end of a cache: TensorRT would drop it and ONNX Runtime move it, without a word."""
    capacity = ring.geometry.capacity
    for row, index in enumerate(write_index.tolist()):
        if not 0 <= index <= capacity - tokens:
            raise InputError(
                f"{ring.write_index}: row {row} writes {tokens} tokens from slot {index}, the cache has C={capacity} slots; split the run "
                "of tokens where the ring wraps"
            )
