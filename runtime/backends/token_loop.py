"""Decoding with no host work per token: the engine picks the token, and the device feeds it back.

One CUDA graph holds LOOP_STEPS decode steps. Positions, slots and, for sampling, random draws of all of them are known beforehand and wait
in pinned memory; each step copies its own in, runs, copies the token that it picked to where the next step reads it, and to a pinned table
that the host reads at the end.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.backends.device_inputs import DeviceInputs

if TYPE_CHECKING:
    from sinkring.runtime.backends.device_backend import Program

LOOP_STEPS = 16


class TokenLoop:
    """Made at opening, after `program` has run once.

    program, inputs: of the decode graph; next_token: device address of its output int64 [B,1].
    """

    def __init__(self, device: Device, program: "Program", inputs: DeviceInputs, next_token: int) -> None:
        self._device, self._program, self._inputs, self._next_token = device, program, inputs, next_token
        self._steps = [inputs.pinned() for _ in range(LOOP_STEPS)]
        self._picked = device.pinned((LOOP_STEPS, *inputs.host["tokens"].shape), np.int64)
        # Full blocks go in one launch; what is left over goes one by one.
        self._graphs = {steps: device.capture(partial(self._enqueue, steps)) for steps in (LOOP_STEPS, 1)}

    def run(self, tokens: NDArray[np.int64], inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """tokens int64 [B,1]: what the first step is fed; inputs: all others for each step, int64 [n,B] by name.

        Returns the tokens that were picked, int64 [n,B]: each but the last was fed to the step after it.
        """
        total = len(inputs["position"])
        picked = np.empty((total, len(tokens)), np.int64)
        at = 0
        while at < total:
            count = LOOP_STEPS if total - at >= LOOP_STEPS else 1
            for step in range(count):
                for name, values in inputs.items():
                    self._steps[step].host[name][:] = values[at + step]
            self._steps[0].host["tokens"][:, 0] = picked[at - 1] if at else tokens[:, 0]
            self._device.launch(self._graphs[count])
            self._device.synchronize()
            picked[at : at + count] = self._picked[:count, :, 0]
            at += count
        return picked

    def _enqueue(self, steps: int) -> None:
        for step in range(steps):
            self._inputs.upload(self._steps[step], tokens=step == 0)
            self._program.enqueue()
            self._device.copy_across(self._inputs.addresses["tokens"], self._next_token, self._picked[step].nbytes)
            self._device.copy_out(self._picked[step], self._next_token)
