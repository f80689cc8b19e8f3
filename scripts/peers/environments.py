"""A virtual environment for each peer, made once, by pip as it is configured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sinkring.models.fetch import cache_folder

# llama.cpp's own probing turns AMX on where a virtual machine says it has it and then dies of it: what this CPU surely has is named.
_LLAMA_CPP_FLAGS = {
    "avx512f": ("AVX512",),
    "avx512vbmi": ("AVX512_VBMI",),
    "avx512_vnni": ("AVX512_VNNI",),
    "avx512_bf16": ("AVX512_BF16",),
    "avx2": ("AVX", "AVX2"),
    "fma": ("FMA",),
    "f16c": ("F16C",),
    "bmi2": ("BMI2",),
}


@dataclass(frozen=True)
class Environment:
    """requirements: as pip takes them. settings: environment variables of the build."""

    name: str
    requirements: tuple[str, ...]
    settings: Callable[[], dict[str, str]] = field(default=dict)


def llama_cpp_settings() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    has = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    on = [name for flag, names in _LLAMA_CPP_FLAGS.items() if flag in has for name in names]
    return {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in on)])}


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            "genai", ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "torch==2.13.0", "transformers==5.24.0", "onnx", "onnx-ir")
        ),
        Environment("llama", ("llama-cpp-python==0.3.36",), llama_cpp_settings),
        Environment("openvino", ("openvino-genai==2026.4.1.0",)),
        Environment("executorch", ("executorch==1.5.1", "torch==2.13.0", "safetensors")),
    )
}


def environments_folder() -> Path:
    return cache_folder() / "peers"


def python_of(name: str, say: Callable[[str], None]) -> Path:
    """The interpreter of an environment, made if it is not there. "sinkring" is the one that runs this. Raises CalledProcessError."""
    if name == "sinkring":
        return Path(sys.executable)
    environment = ENVIRONMENTS[name]
    folder = environments_folder() / name
    python, stamp = folder / "bin" / "python", folder / "made-from.json"
    settings = environment.settings()
    wanted = json.dumps([environment.requirements, settings])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"making the environment {name}: {', '.join(environment.requirements)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *environment.requirements]
    subprocess.run(pip, check=True, env={**os.environ, **settings})
    stamp.write_text(wanted, encoding="utf-8")
    return python
