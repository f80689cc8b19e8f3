"""bfloat16 on the host. numpy has no such type: its 16 bits, the upper half of a float32, are held as uint16.

Only the runtime's own: the exporter's packages bring a numpy type for it, which a machine that only runs bundles does not have.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BFLOAT16 = "bfloat16"
# Its number in ONNX, for a runtime that is given a buffer of uint16.
ONNX_BFLOAT16 = 16
_QUIET_NAN = 0x40


def host_dtype(dtype: str) -> np.dtype[Any]:
    """What an array of a manifest's `dtype` is in numpy."""
    return np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)


def element_type(dtype: str) -> Any:
    """What ONNX Runtime is told that a buffer of a manifest's `dtype` holds."""
    return ONNX_BFLOAT16 if dtype == BFLOAT16 else np.dtype(dtype).type


def to_host(values: ArrayLike, dtype: str) -> NDArray[Any]:
    """Real numbers as an array of `dtype`, a manifest's."""
    return round_to_bfloat16(values) if dtype == BFLOAT16 else np.asarray(values, np.dtype(dtype))


def from_host(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers of an array of `dtype`, a manifest's: of bfloat16 a copy in float32, of all else the array itself."""
    return widen_bfloat16(array) if dtype == BFLOAT16 else array


def round_to_bfloat16(values: ArrayLike) -> NDArray[np.uint16]:
    """uint16 of the same shape: each float32 to the nearest bfloat16, ties to the even one, as hardware does. NaN stays NaN."""
    wide = np.asarray(values, np.float32)
    bits = wide.view(np.uint32)
    # What is added carries into the upper half where the lower one is past the middle, or at it with an odd upper half.
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(wide), (bits >> np.uint32(16)) | np.uint32(_QUIET_NAN), nearest).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 of the same shape; exact."""
    assert bits.dtype == np.uint16, f"bfloat16 is held as uint16, not {bits.dtype}"
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
