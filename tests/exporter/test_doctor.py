"""The doctor: true to what is installed, useful about what is not, and light enough to run anywhere."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from sinkring.exporter import doctor
from sinkring.exporter.doctor import BACKENDS, PACKAGES, Package, Range, Wanted, check_package, diagnose, wanted_ranges
from sinkring.exporter.machine import Gpu, describe_machine, find_gpus

ROOT = Path(__file__).parents[2]


def test_reports_what_is_installed() -> None:
    found = {package.name: package for package in diagnose().packages}
    assert found["numpy"].version == metadata.version("numpy")
    assert found["torch"].version == metadata.version("torch")
    assert {package.state for package in found.values()} == {"ok"}
    backends = {backend.name: backend for backend in diagnose().backends}
    assert backends["onnxruntime"].package.version == metadata.version("onnxruntime")


def test_providers_are_those_onnxruntime_names() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    backends = {backend.name: backend for backend in diagnose().backends}
    named = {name.removesuffix("ExecutionProvider").lower() for name in onnxruntime.get_available_providers()}
    # Azure is a remote caller that every build carries inside the library and that runs nothing here.
    assert {name.replace("_", "") for name in backends["onnxruntime"].providers} == named - {"azure"}


def test_covers_every_package_a_user_can_lack() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra, lines in extras.items() if extra != "dev" for line in lines)]
    names = {line.partition(">=")[0] for line in asked if not line.startswith("sinkring[")}
    known = {wanted.name for wanted in [*PACKAGES, *(wanted for candidates in BACKENDS.values() for wanted in candidates)]}
    assert known == names


def test_ranges_are_those_of_pyproject() -> None:
    ranges = wanted_ranges()
    assert ranges["numpy"] == Range("2.0", "")
    assert ranges["onnxruntime"] == Range("1.30", "cpu")
    assert ranges["cuda-bindings"] == Range("12.6", "gpu")


def test_missing_package_says_what_for_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    package = {backend.name: backend.package for backend in diagnose().backends}["tensorrt-rtx"]
    assert package.state == "missing"
    assert package.advice.startswith("for building TensorRT-RTX engines")
    assert package.advice.endswith("pip install 'sinkring[tensorrt-rtx]'")


@pytest.mark.parametrize(
    ("version", "minimum", "state"),
    [
        ("1.29.9", "1.30", "old"),
        ("1.30", "1.30", "ok"),
        ("1.30.0", "1.30", "ok"),
        ("2.0", "2.0.0", "ok"),
        ("2.13.0+cpu", "2.13", "ok"),
        ("2.9", "2.13", "old"),
        ("10", "9.9", "ok"),
    ],
)
def test_versions_compare_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, minimum: str, state: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    package = check_package(Wanted("numpy", "numpy", "the test"), Range(minimum, "cpu"))
    assert package.state == state
    assert ("pip install --upgrade 'sinkring[cpu]'" in package.advice) == (state == "old")


def test_package_without_its_module_is_broken() -> None:
    package = check_package(Wanted("numpy", "numpy_gone.nowhere", "the test"), Range("1", ""))
    assert package.state == "broken"
    assert "pip install --force-reinstall --no-deps numpy" in package.advice


def test_second_package_of_a_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1.32.0" if name == "onnxruntime-gpu" else None)
    package = {backend.name: backend.package for backend in diagnose().backends}["onnxruntime"]
    assert (package.name, package.state) == ("onnxruntime-gpu", "ok")


def test_gpus_are_read_from_nvidia_smi() -> None:
    gpus, note = find_gpus(lambda: "NVIDIA L4, 580.65.06, 8.9, 23034\nNVIDIA GeForce RTX 5090, 580.65.06, 12.0, 32607\n")
    assert gpus == (Gpu("NVIDIA L4", "580.65.06", 89, 23034 * 2**20), Gpu("NVIDIA GeForce RTX 5090", "580.65.06", 120, 32607 * 2**20))
    assert note == ""


def test_no_gpu_says_why() -> None:
    def absent() -> str:
        raise FileNotFoundError

    def failing() -> str:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    assert find_gpus(absent) == ((), "none (nvidia-smi not found)")
    assert "exit status 9" in find_gpus(failing)[1]
    assert find_gpus(lambda: "")[1] == "none (nvidia-smi lists no GPU)"
    assert "No devices were found" in find_gpus(lambda: "No devices were found")[1]


def test_machine_is_described() -> None:
    machine = describe_machine()
    assert machine.python.endswith(".".join(map(str, sys.version_info[:3])))
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.memory_bytes is None or machine.memory_bytes > 2**28


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SINKRING_CACHE", str(tmp_path / "not" / "yet"))
    cache = diagnose().cache
    assert (cache.path, cache.exists) == (str(tmp_path / "not" / "yet"), False)
    assert cache.free_bytes > 0
    assert diagnose(tmp_path).cache.exists


def test_json_and_rows_carry_everything() -> None:
    diagnosis = diagnose()
    parsed = json.loads(json.dumps(diagnosis.to_dict()))
    assert parsed["machine"]["cores"] == diagnosis.machine.cores
    rows = {row.item: row for row in diagnosis.rows()}
    assert rows["backend onnxruntime"].found.startswith(metadata.version("onnxruntime"))
    packages: list[Package] = [*diagnosis.packages, *(backend.package for backend in diagnosis.backends)]
    for package in packages:
        assert package.advice in {row.advice for row in rows.values()}


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sinkring.exporter.doctor import diagnose; diagnose().rows(); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'transformers', 'onnx', 'onnxruntime', 'tensorrt_rtx', 'numpy'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
