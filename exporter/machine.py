"""What this machine is: interpreter, system, CPU, memory, GPUs. Needs nothing but the standard library and, for GPUs, nvidia-smi."""

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """cores: those this process may use. memory_bytes is None where the system doesn't tell."""

    python: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it; sm is the compute capability without its dot, 89 for 8.9."""

    name: str
    driver: str
    sm: int
    memory_bytes: int


def describe_machine() -> Machine:
    """The machine this process runs on. Never raises."""
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
    )


def find_gpus(ask: Callable[[], str] | None = None) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that nvidia-smi lists, and why there are none ("" when there are). Never raises.

    `ask` stands in for nvidia-smi: it returns the CSV of `_ask_nvidia_smi` or raises what subprocess.run raises.
    """
    try:
        text = (ask or _ask_nvidia_smi)()
    except FileNotFoundError:
        return (), "none (nvidia-smi not found)"
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"none (nvidia-smi failed: {error})"
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            name, driver, capability, memory_mib = (field.strip() for field in line.rsplit(",", 3))
            major, minor = capability.split(".")
            gpus.append(Gpu(name, driver, int(major) * 10 + int(minor), int(memory_mib) * 1024**2))
        except ValueError:
            return (), f"none (nvidia-smi answered {line!r})"
    return tuple(gpus), "" if gpus else "none (nvidia-smi lists no GPU)"


def _ask_nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def _memory_bytes() -> int | None:
    total = _value(Path("/proc/meminfo"), "MemTotal")
    if total is not None:
        return int(total.split()[0]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _value(path: Path, key: str) -> str | None:
    """The first `key: value` line of a /proc file; None without the file or the key."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None
