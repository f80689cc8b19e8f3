"""Memory that an export takes at its highest, against the model's size in fp32: export_memory.py MODEL --out BUNDLE [options of `export`].

Prints one JSON object; bytes. `own` is memory that is the process's alone (RssAnon), `resident` also counts pages of mapped files, which
the system takes back when it needs them. `interpreter` is what either is before anything is loaded, torch and transformers imported.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLE_S = 0.02


def peaks(command: list[str], say: bool) -> dict[str, int]:
    """Highest RssAnon and VmRSS of a process, seen every 20 ms. Raises SystemExit if it fails."""
    found = {"own": 0, "resident": 0}
    with subprocess.Popen(command, stdout=None if say else subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            try:
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except OSError:
                break
            if "VmRSS" in lines:
                own, resident = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
                if say and own > found["own"] * 1.1:
                    print(f"own {own / 1e6:,.0f} MB", file=sys.stderr, flush=True)
                found = {"own": max(found["own"], own), "resident": max(found["resident"], resident)}
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(process.returncode)
    return found


def fp32_bytes(model: str) -> int:
    """Of all weights of a model, each once."""
    code = (
        "import sys; from sinkring.models.source import load_model; "
        "print(sum(weight.numel() * 4 for weight in load_model(sys.argv[1]).model.parameters()))"
    )
    return int(subprocess.run([sys.executable, "-c", code, model], check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    model, *options = sys.argv[1:] or ["smollm2"]
    interpreter = peaks([sys.executable, "-c", "import transformers.modeling_utils, sinkring.exporter.export"], False)
    with tempfile.TemporaryDirectory() as scratch:
        options = options or ["--out", f"{scratch}/bundle"]
        command = [sys.executable, "-m", "sinkring.exporter.cli", "export", model, *options, "--json"]
        export = peaks(command, False)
    size = fp32_bytes(model)
    ratio = {name: round((export[name] - interpreter[name]) / size, 2) for name in export}
    print(json.dumps({"model": model, "fp32_bytes": size, "interpreter": interpreter, "export": export, "times_the_model": ratio}))


if __name__ == "__main__":
    main()
