"""`sinkring inspect` and the table of engines, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table
from sinkring.exporter.cli_weights import describe_weights
from sinkring.exporter.engine_summary import EngineSummary

if TYPE_CHECKING:
    from sinkring.exporter.inspect import Inspection


def print_inspection(found: "Inspection") -> None:
    manifest = found.manifest
    model = manifest.model
    print_facts(
        {
            "model": f"{model.architecture} from {model.source}",
            "sizes": f"{model.layers} layers, hidden {model.hidden_size}, H={model.query_heads} G={model.kv_heads} D={model.head_size} "
            f"V={model.vocab_size}, trained for {model.trained_context_tokens} tokens",
            "policy": manifest.policy,
            "batch, chunk": f"B={manifest.batch}, {manifest.chunk} tokens",
            "a step is fed": f"{manifest.input_name}, {manifest.input_dtype}",
            "positions": _positions(found),
            "weights": describe_weights(manifest),
            "cache": f"{found.cache_bytes:,} bytes at every age, {manifest.cache_dtype}",
            "tokenizer": _tokenizer(found),
            "files": f"{len(manifest.files)}, each with the bytes and sha256 of the manifest",
            "made with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.made_with.items())),
        },
        title=found.bundle,
    )
    print()
    print_table(
        ("ring", "kind", "S", "W", "M", "C", "slack", "layers", "tensors", "shape of each", "bytes", "(S+M)*2*L*G*D*bytes*B"),
        [
            (
                ring.write_index,
                ring.kind,
                ring.sinks_tokens,
                ring.window_tokens,
                ring.slots,
                ring.capacity,
                ring.slack_tokens,
                ring.layers,
                ring.tensors,
                f"{ring.dtype} [{','.join(map(str, ring.shape))}]",
                ring.allocated_bytes,
                ring.formula_bytes,
            )
            for ring in found.rings
        ],
    )
    for graph in found.graphs:
        print()
        print_facts(
            {
                "used by": ", ".join(graph.uses),
                "tokens": f"up to {graph.tokens}" if graph.tokens > 1 else "1",
                "operators": ", ".join(f"{count} {name}" for name, count in graph.operators.items()),
            },
            title=f"{graph.path}: {graph.nodes} nodes, opset {graph.opset}",
        )
    if found.engines:
        print()
        print_engines([engine.summary for engine in found.engines])
    for engine in found.engines:
        if engine.stale:
            print(f"{engine.summary.path}: is stale, its graph has changed since: build it again")


def print_engines(engines: Sequence[EngineSummary]) -> None:
    """One row an engine; then its warnings, each with its engine's name."""
    print_table(
        ("engine", "layers", "in-place updates", "attention kernel", "cache-sized copies", "kernels", "scratch bytes", "bytes", "seconds"),
        [
            (
                engine.path,
                engine.layers,
                f"{engine.updates_in_place}/{engine.updates}",
                engine.attention,
                f"{engine.copies} a step" if "decode" in engine.role else f"{engine.copies} a chunk",
                engine.kernels,
                "not said" if engine.scratch_bytes is None else engine.scratch_bytes,
                engine.engine_bytes,
                round(engine.build_s, 1),
            )
            for engine in engines
        ],
    )
    for engine in engines:
        for warning in engine.warnings:
            print(f"{engine.path}: {warning}")


def _positions(found: "Inspection") -> str:
    full = [ring.most_tokens for ring in found.rings if ring.most_tokens is not None]
    return f"a stream is full after {min(full):,} tokens" if full else f"exact up to {found.manifest.position_limit:,}"


def _tokenizer(found: "Inspection") -> str:
    tokenizer = found.manifest.tokenizer
    if tokenizer is None:
        return "none: takes token ids only"
    return f"stop ids {', '.join(map(str, tokenizer.stop_ids)) or 'none'}; {'with a' if tokenizer.chat_template else 'no'} chat template"
