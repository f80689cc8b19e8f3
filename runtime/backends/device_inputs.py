"""The inputs of one program, side by side in pinned host memory and on the device, so that one copy takes them all over."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends.cuda import Device, aligned


class PinnedInputs:
    """host: an array for each input, by name, to be filled in: of `dtype` the first, int64 all others."""

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.offsets: dict[str, int] = {}
        types = dict.fromkeys(shapes, np.dtype(np.int64)) | {next(iter(shapes)): np.dtype(dtype)}
        sizes = {name: math.prod(shape) * types[name].itemsize for name, shape in shapes.items()}
        end = 0
        for name in shapes:
            self.offsets[name] = end
            end += aligned(sizes[name])
        self.whole: NDArray[np.uint8] = device.pinned((end,), np.uint8)
        self.host: dict[str, NDArray[Any]] = {
            name: self.whole[self.offsets[name] :][: sizes[name]].view(types[name]).reshape(shape) for name, shape in shapes.items()
        }


class DeviceInputs:
    """shapes: of each input, what a step is fed first, of `dtype`; the others are int64.

    host: what `upload` takes over; addresses: where the program finds them on the device.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]], dtype: str = "int64") -> None:
        self._device, self._shapes, self._dtype = device, shapes, dtype
        self._inputs = PinnedInputs(device, shapes, dtype)
        self.host = self._inputs.host
        self._address = device.allocate(self._inputs.whole.nbytes, "inputs")
        self.addresses = {name: self._address + offset for name, offset in self._inputs.offsets.items()}

    def pinned(self) -> PinnedInputs:
        """Another set of the same inputs, for `upload`."""
        return PinnedInputs(self._device, self._shapes, self._dtype)

    def upload(self, inputs: PinnedInputs | None = None, tokens: bool = True) -> None:
        """To the device, in stream order: `host` or another set, with what a step is fed or all but that."""
        whole = (inputs or self._inputs).whole
        # What follows the first.
        start = 0 if tokens else sorted(self._inputs.offsets.values())[1]
        self._device.copy_in(self._address + start, whole[start:])
