"""What a user may tell an engine builder: how long to search, how much memory to use, and what was timed before."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sinkring.runtime.device_sampling import MOST_TOP_K
from sinkring.runtime.errors import BundleError, InputError

MOST_EFFORT = 5
_MIB = 1 << 20


@dataclass(frozen=True)
class BuilderOptions:
    """optimization_level: 0 (quick to build) to 5 (longest search); workspace_mib: most scratch memory of any one kernel, in MiB;
    timing_cache: a file of kernel timings, read if it is there and written after each build. None: the builder's own default.
    next_token: see add_next_token. sample_top_k: K of append_sampling_head, whose engines pick the likeliest token as well.

    Raises InputError for a number out of range.
    """

    optimization_level: int | None = None
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    next_token: bool = False
    sample_top_k: int | None = None

    def __post_init__(self) -> None:
        level, workspace = self.optimization_level, self.workspace_mib
        if level is not None and (isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= MOST_EFFORT):
            raise InputError(f"optimization_level={level!r}: must be a whole number, 0 to {MOST_EFFORT}")
        if workspace is not None and (isinstance(workspace, bool) or not isinstance(workspace, int) or workspace < 1):
            raise InputError(f"workspace_mib={workspace!r}: must be a whole number of MiB, 1 or more")
        top_k = self.sample_top_k
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or not 2 <= top_k <= MOST_TOP_K):
            raise InputError(f"sample_top_k={top_k!r}: must be a whole number, 2 to {MOST_TOP_K}; next_token picks the likeliest")
        if top_k is not None and self.next_token:
            raise InputError(
                f"next_token and sample_top_k={top_k}: an engine that samples picks the likeliest token as well; leave next_token out"
            )

    def check_target(self, target: str) -> None:
        """Raises InputError for an option that does nothing with `target`."""
        if self.timing_cache is not None and target == "tensorrt-rtx":
            raise InputError(f"timing_cache={str(self.timing_cache)!r}: TensorRT-RTX times nothing when it builds; leave it out")

    def apply(self, trt: ModuleType, config: Any) -> None:
        """Set them on an IBuilderConfig. Raises BundleError for a timing cache that cannot be read or is of another builder or GPU."""
        if self.optimization_level is not None:
            config.builder_optimization_level = self.optimization_level
        if self.workspace_mib is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace_mib * _MIB)
        if self.timing_cache is not None:
            try:
                content = self.timing_cache.read_bytes() if self.timing_cache.exists() else b""
            except OSError as error:
                raise BundleError(f"timing cache {self.timing_cache}: cannot be read ({error.strerror}); name another file") from None
            if not config.set_timing_cache(config.create_timing_cache(content), False):
                raise BundleError(
                    f"timing cache {self.timing_cache}: is not one of TensorRT {trt.__version__} on this GPU; remove it, or name another"
                )

    def keep_timings(self, config: Any) -> None:
        """Write what this build has timed for the next. Raises BundleError when it cannot be written."""
        if self.timing_cache is None:
            return
        try:
            self.timing_cache.parent.mkdir(parents=True, exist_ok=True)
            partial = self.timing_cache.with_name(f".{self.timing_cache.name}.part")
            partial.write_bytes(memoryview(config.get_timing_cache().serialize()))
            partial.replace(self.timing_cache)
        except OSError as error:
            raise BundleError(f"timing cache {self.timing_cache}: cannot be written ({error.strerror}); name another file") from None
