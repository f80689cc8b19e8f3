"""TensorRT as the builder would meet it, played by TensorRT-RTX without the names that only TensorRT-RTX has.

It compiles for a GPU that is present, of which TensorRT-RTX makes none on a machine without one: what is checked is that the builder asks
for nothing that TensorRT lacks.
"""

from typing import Any

import pytest

rtx = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

RTX_ONLY = ("ComputeCapability", "CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy", "IRuntimeCache", "IRuntimeConfig")


class _Flags:
    def __getattr__(self, name: str) -> Any:
        if name == "REQUIRE_USER_ALLOCATION":
            raise AttributeError(name)
        return getattr(rtx.BuilderFlag, name)


class Enterprise:
    __version__ = "11.4.1"
    BuilderFlag = _Flags()

    def __getattr__(self, name: str) -> Any:
        if name in RTX_ONLY:
            raise AttributeError(name)
        return getattr(rtx, name)
