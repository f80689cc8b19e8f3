"""The int64 inputs of one program, side by side in pinned host memory and on the device, so that one copy takes them all over."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends.cuda import Device, aligned


class PinnedInputs:
    """host: an array for each input, by name, to be filled in."""

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.offsets[name] = end
            end += aligned(8 * math.prod(shape))
        self.whole: NDArray[np.int64] = device.pinned((end // 8,), np.int64)
        self.host: dict[str, NDArray[np.int64]] = {
            name: self.whole[self.offsets[name] // 8 :][: math.prod(shape)].reshape(shape) for name, shape in shapes.items()
        }


class DeviceInputs:
    """shapes: of each input, `tokens` first. host: what `upload` takes over; addresses: where the program finds them on the device."""

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert next(iter(shapes)) == "tokens"
        self._device, self._shapes = device, shapes
        self._inputs = PinnedInputs(device, shapes)
        self.host = self._inputs.host
        self._address = device.allocate(self._inputs.whole.nbytes, "inputs")
        self.addresses = {name: self._address + offset for name, offset in self._inputs.offsets.items()}

    def pinned(self) -> PinnedInputs:
        """Another set of the same inputs, for `upload`."""
        return PinnedInputs(self._device, self._shapes)

    def upload(self, inputs: PinnedInputs | None = None, tokens: bool = True) -> None:
        """To the device, in stream order: `host` or another set, with the tokens or all but them."""
        whole = (inputs or self._inputs).whole
        # What follows the tokens.
        start = 0 if tokens else sorted(self._inputs.offsets.values())[1]
        self._device.copy_in(self._address + start, whole[start // 8 :])
