"""What TensorRT-RTX makes of every family: both graphs of each row of the parity table, with the heads of real models, built for one GPU.

The models are random, with the few layers and the narrow MLPs of tests/models/tiny_families.py, but with query heads, KV heads and a head
size as their checkpoints have them, a whole group of heads or more: on these depends which kernels the builder has. No GPU is needed.

Prints a table and writes it, and the same as JSON, to docs/results/plan-families.*; names of rows as arguments build only those and write
nothing. Exit status 1 if an engine could not be built.
"""

import dataclasses
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sinkring.exporter.cli_output import note, print_table
from sinkring.exporter.export import export_decoder
from sinkring.exporter.family_table import markdown_table
from sinkring.exporter.plan_table import plan_rows
from sinkring.models.refused import REFUSED

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


from tests.models.tiny_families import TINY_FAMILIES, TinyFamily, tiny_model  # noqa: E402 - only the root on the path makes it importable

RESULTS = ROOT / "docs" / "results"
SM, SINKS, WINDOW, CHUNK = 89, 4, 120, 16
# H, G, D of a checkpoint, H and G over a common factor: Gemma 2B, Phi-2, GPT-J 6B, Falcon 7B, StableLM 2 1.6B, Pythia 1.4B and so on.
HEADS = {
    "qwen2": (14, 2, 64),
    "qwen3": (8, 4, 128),
    "qwen3_moe": (8, 1, 128),
    "gemma": (8, 1, 256),
    "gemma2": (8, 4, 256),
    "gemma3_text": (4, 1, 256),
    "phi": (8, 8, 80),
    "phi3": (8, 8, 96),
    "phi3-longrope": (6, 2, 128),
    "olmo": (8, 8, 128),
    "olmo2": (8, 8, 128),
    "olmo3": (8, 8, 128),
    "granite": (8, 2, 64),
    "stablelm": (8, 8, 64),
    "starcoder2": (12, 1, 128),
    "gpt_neox": (8, 8, 128),
    "gptj": (4, 4, 256),
    "falcon": (8, 1, 64),
    "falcon-new": (8, 2, 64),
    "falcon-alibi": (8, 8, 64),
    "mpt": (8, 8, 128),
    "bloom": (8, 8, 128),
    "cohere": (8, 8, 128),
    "glm": (16, 1, 128),
    "glm4": (16, 1, 128),
    "gpt_oss": (8, 1, 64),
    "helium": (8, 8, 128),
    "arcee": (10, 2, 128),
    "seed_oss": (10, 1, 128),
    "ernie4_5": (8, 1, 128),
    "olmoe": (8, 8, 128),
    "granitemoe": (6, 2, 64),
    "nemotron": (6, 1, 128),
    "persimmon": (8, 8, 64),
    "qwen2_moe": (8, 8, 128),
    "moshi": (8, 8, 128),
    "moshi-sliding": (8, 8, 128),
    "kyutai_speech_to_text": (8, 8, 64),
    "voxtral_realtime": (8, 2, 128),
}
LIKE_LLAMA = (8, 2, 128)
# What a configuration calls the width and the heads, where not hidden_size and num_attention_heads.
NAMES = {"gptj": ("n_embd", "n_head"), "mpt": ("d_model", "n_heads"), "bloom": ("hidden_size", "n_head")}


@dataclasses.dataclass(frozen=True)
class Planned:
    """One engine. kernels_per_layer: of all layers but the last, which ends with the graph. fault: why it was not kept, or nothing."""

    row: str
    role: str
    heads: str
    layers: int
    kernels: int
    kernels_per_layer: float
    in_place: str
    attention: str
    copies: int
    fault: str


def main() -> int:
    """Build the rows named as arguments, or all."""
    wanted = sys.argv[1:]
    rows = [row for row in TINY_FAMILIES if row.name not in REFUSED and (not wanted or row.name in wanted)]
    planned: list[Planned] = []
    for number, row in enumerate(rows, 1):
        note(f"{row.name}: {number} of {len(rows)}")
        with tempfile.TemporaryDirectory() as folder:
            planned += plan_family(row, Path(folder))
    headings = [field.name.replace("_", " ") for field in dataclasses.fields(Planned)]
    cells = [dataclasses.astuple(engine) for engine in planned]
    print_table(headings, cells)
    if not wanted:
        builder = f"TensorRT-RTX {version('tensorrt-rtx-cu13')}, SM {SM}"
        result = {"builder": builder, "engines": [dataclasses.asdict(engine) for engine in planned]}
        (RESULTS / "plan-families.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        table = markdown_table(headings, [[str(cell) for cell in row] for row in cells])
        (RESULTS / "plan-families.md").write_text(f"`scripts/plan_families.py`, {builder}\n\n{table}", encoding="utf-8")
    return int(any(engine.fault for engine in planned))


def plan_family(row: TinyFamily, folder: Path) -> list[Planned]:
    """Export a row with its heads and build both graphs."""
    heads = HEADS.get(row.name, LIKE_LLAMA)
    # As wide as this, weights like those of the narrow models make scores so large that a softmax sees one key alone.
    std = 0.3 * (32 / (heads[0] * heads[2])) ** 0.5
    tiny_model(row, std=std, **wide(row, *heads)).save_pretrained(folder / "model")
    options: dict[str, Any] = {"sinks": SINKS, "window": WINDOW} if row.has_full_layers else {}
    manifest = export_decoder(folder / "model", folder / "bundle", chunk=CHUNK, targets=["tensorrt-rtx"], **options)
    return [
        Planned(
            row=row.name,
            role=plan.role,
            heads="{}/{} x {}".format(*heads),
            layers=manifest.model.layers,
            kernels=plan.kernels,
            kernels_per_layer=plan.kernels_per_layer,
            in_place=plan.in_place,
            attention=plan.attention,
            copies=plan.copies,
            fault=plan.refusal,
        )
        for plan in plan_rows(folder / "bundle", [SM])
    ]


def wide(row: TinyFamily, query_heads: int, kv_heads: int, head_size: int) -> dict[str, Any]:
    """Settings over the row's own: heads of that number and size, and trained windows as long as the other layers' rings."""
    width, heads = NAMES.get(row.name, ("hidden_size", "num_attention_heads"))
    settings: dict[str, Any] = {width: query_heads * head_size, heads: query_heads}
    sizes = {
        "num_key_value_heads": kv_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_size,
        "rotary_dim": head_size // 4,
        "intermediate_size": 256,
        "sliding_window": WINDOW if any(row.sliding) else None,
    }
    own = row.settings.get("text_config", row.settings)
    settings |= {name: value for name, value in sizes.items() if name in own and value is not None}
    if own is not row.settings:
        return {"text_config": {**own, **settings}}
    rope = row.settings.get("rope_parameters", {})
    if "short_factor" in rope:
        settings["rope_parameters"] = {**rope, "short_factor": [1.0] * (head_size // 2), "long_factor": [2.0] * (head_size // 2)}
    return settings


if __name__ == "__main__":
    sys.exit(main())
