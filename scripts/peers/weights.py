"""The same weights for every peer, in the form it takes: all made from the one GGUF file, once."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from environments import environments_folder, python_of
from sinkring.exporter.export import export_decoder
from sinkring.models.source import load_model, resolve_source

HERE = Path(__file__).parent
SOURCE = "smollm2"
Say = Callable[[str], None]


def gguf(say: Say) -> Path:
    return resolve_source(SOURCE).path


def hugging_face(say: Say) -> Path:
    """A folder of safetensors, dequantized to float32, with the GGUF's tokenizer."""

    def make(out: Path) -> None:
        from transformers import AutoTokenizer

        load_model(SOURCE).model.save_pretrained(out)
        source = resolve_source(SOURCE).path
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)

    return _once("hugging-face", make, say)


def bundle(weights: str, window: int, say: Say, chunk: int = 64) -> Path:
    return _once(
        f"bundle-{weights}-w{window}-c{chunk}",
        lambda out: export_decoder(SOURCE, out, window=window, chunk=chunk, weights=weights, progress=say),  # type: ignore[arg-type]
        say,
    )


def genai(precision: str, say: Say) -> Path:
    """What onnxruntime-genai's own builder makes of the folder; int4 with accuracy level 4, its fast one."""
    source = hugging_face(say)

    def make(out: Path) -> None:
        command = [python_of("genai", say), "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", out, "-p", precision, "-e", "cpu"]
        with_cache = [*command, "-c", out.parent / "genai-cache", "--extra_options", "int4_accuracy_level=4"]
        subprocess.run(with_cache, check=True, stdout=subprocess.DEVNULL)

    return _once(f"genai-{precision}", make, say)


def llama_float(kind: str, say: Say) -> Path:
    """The GGUF file with all its tensors in F32 or F16, by llama.cpp's own quantizer."""
    source = gguf(say)

    def make(out: Path) -> None:
        out.mkdir()
        code = (
            "import llama_cpp, sys\n"
            "options = llama_cpp.llama_model_quantize_default_params()\n"
            f"options.ftype = {'llama_cpp.LLAMA_FTYPE_ALL_F32' if kind == 'F32' else 'llama_cpp.LLAMA_FTYPE_MOSTLY_F16'}\n"
            "options.allow_requantize = True\n"
            "sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))\n"
        )
        subprocess.run([python_of("llama", say), "-c", code, source, out / "model.gguf"], check=True, capture_output=True)

    return _once(f"llama-{kind}", make, say) / "model.gguf"


def executorch(precision: str, window: int, say: Say) -> Path:
    """A .pte for XNNPACK with ExecuTorch's attention sink: 4 sinks, and a window that makes 1 + the rest of `window`."""
    source = hugging_face(say)

    def make(out: Path) -> None:
        out.mkdir()
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        command = [python_of("executorch", say), HERE / "export_executorch.py", source, out, precision, str(window)]
        subprocess.run([*command, json.dumps(config)], check=True, stdout=subprocess.DEVNULL)

    return _once(f"executorch-{precision}-w{window}", make, say) / "model.pte"


def _once(name: str, make: Callable[[Path], object], say: Say) -> Path:
    """A folder that is made beside its place and moved there when it is whole."""
    out = environments_folder() / "models" / name
    if out.exists():
        return out
    say(f"making {name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    make(beside)
    beside.replace(out)
    return out
