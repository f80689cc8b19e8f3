"""The commands and their options. Each is one call of the library and a print; what is heavy is imported inside."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from sinkring.exporter.cli_app import VALIDATION_FAILED, BundleArgument, JsonOption, app
from sinkring.exporter.cli_faults import needs_extra
from sinkring.exporter.cli_output import print_facts, print_json, print_table, progress_bars, stage_status


@app.command("export")
def export_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, .gguf file, or a known name: smollm2.")],
    # Text, since a Path makes "" into ".".
    out: Annotated[str, typer.Option(help="Folder of the new bundle.", show_default=False)],
    policy: Annotated[str, typer.Option(help="Positions: streaming (sinks stay near, no end) or native (as trained).")] = "streaming",
    sinks: Annotated[
        int | None, typer.Option(help="First tokens of a stream that are kept for ever. Default: 4.", show_default=False)
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Recent tokens that each token sees, itself included. Default: 256.", show_default=False)
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="With --policy native: full attention over at most so many tokens, no sinks or window.", show_default=False),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt that are read in one call.")] = 64,
    batch: Annotated[int, typer.Option(help="Streams side by side.")] = 1,
    dtype: Annotated[str, typer.Option(help="Numbers in weights and arithmetic: fp32, fp16, bf16.")] = "fp32",
    cache_dtype: Annotated[
        str | None,
        typer.Option(help="Numbers in the caches: fp32, or fp16 or bf16 for half the bytes. Default: as --dtype.", show_default=False),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="How weights are stored: fp32, int8, int8-rows (fast prompts on a CPU), int4, or fp8 (for engines, see --target)."
        ),
    ] = "fp32",
    keep_fp32: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="With weights of 4 or 8 bits, those that stay as they are: 'model.layers.0.*'. May be given again.",
            show_default=False,
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help="With int4 for an engine, weights that share a scale: 32, 64 or 128. Default: 32.", show_default=False),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Only graphs for onnxruntime, tensorrt-rtx, tensorrt, tensorrt-10.3 (JetPack 6) or tensorrt-rtx-sm75 (Turing). May be "
            "given again. Default: all that run such weights but the last two.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="What a step is fed: tokens, or embeddings of your own making. Default: as the model.", show_default=False),
    ] = None,
    slack: Annotated[int, typer.Option(help="Tokens that can be rolled back.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a bundle that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a trained decoder into a bundle: ring graphs, weights, tokenizer, manifest."""
    with needs_extra("export", "export"):
        from sinkring.exporter.cli_weights import describe_weights
        from sinkring.exporter.export import export_decoder
    began = time.perf_counter()
    with stage_status() as progress:
        manifest = export_decoder(
            model,
            out,
            policy=policy,  # type: ignore[arg-type]  # checked there, with a message that names the choices
            sinks=sinks,
            window=window,
            capacity=capacity,
            chunk=chunk,
            batch=batch,
            slack=slack,
            dtype=dtype,
            cache_dtype=cache_dtype,
            weights=weights,  # type: ignore[arg-type]  # likewise
            keep_fp32=keep_fp32 or (),
            block=block,
            targets=target or None,
            inputs=inputs,
            overwrite=overwrite,
            progress=progress,
        )
    seconds = round(time.perf_counter() - began, 1)
    if as_json:
        print_json({"bundle": out, "seconds": seconds, "cache_bytes": manifest.cache_bytes, "manifest": dataclasses.asdict(manifest)})
        return
    geometry = manifest.rings[0].geometry
    ring = f"S={geometry.sinks_tokens} W={geometry.window_tokens} M={geometry.slots} C={geometry.capacity}, B={manifest.batch}"
    linear = f"linear, full after {geometry.most_tokens} tokens, C={geometry.capacity}, B={manifest.batch}"
    print_facts(
        {
            "policy": manifest.policy,
            "ring": ring if geometry.wraps else linear,
            "weights": describe_weights(manifest),
            "cache": f"{manifest.cache_bytes:,} bytes at every age, {manifest.cache_dtype}",
            "graphs": ", ".join(sorted({graph.path for graph in manifest.graphs})),
            "seconds": seconds,
        },
        title=out,
    )


@app.command("build")
def build_command(
    bundle: BundleArgument,
    target: Annotated[
        str, typer.Option(help="tensorrt-rtx (needs no GPU), tensorrt or tensorrt-10.3 (for the GPU that is present).")
    ] = "tensorrt-rtx",
    sm: Annotated[
        str | None,
        typer.Option(help="Compute capabilities as 10 x major + minor, with commas: 89,120. Default 89, or the GPU.", show_default=False),
    ] = None,
    optimization_level: Annotated[
        int | None, typer.Option(help="0 builds quickly, 5 searches longest. Default: the builder's.", show_default=False)
    ] = None,
    workspace: Annotated[
        int | None, typer.Option(metavar="MIB", help="Most scratch memory of a kernel. Default: the builder's.", show_default=False)
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With tensorrt: kernel timings, read and written, for quicker builds.", show_default=False),
    ] = None,
    next_token: Annotated[bool, typer.Option("--next-token", help="Decode engines pick the likeliest token by themselves.")] = False,
    sample_top_k: Annotated[
        int | None,
        typer.Option(metavar="K", help="Decode engines sample by themselves, from up to K tokens. Default: do not.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build engines from a bundle and check their plans."""
    sms = None if sm is None else parse_sms(sm)
    with needs_extra("export", "build"):
        from sinkring.exporter.build import build_engine
    from sinkring.exporter.cli_inspect import print_engines
    from sinkring.exporter.engine_summary import EngineSummary

    with progress_bars() as progress:
        built = build_engine(
            bundle,
            target,
            sms,
            optimization_level=optimization_level,
            workspace_mib=workspace,
            timing_cache=timing_cache,
            next_token=next_token,
            sample_top_k=sample_top_k,
            progress=progress,
        )
    reports = [json.loads(report.to_json()) for report in built]
    if as_json:
        print_json({"bundle": str(bundle), "engines": reports})
        return
    print_engines([EngineSummary.from_report(report, report["engine_path"]) for report in reports])


@app.command("run")
def run_command(
    bundle: BundleArgument,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from. Default: stdin.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer each line of stdin, in one stream without end.")] = False,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this part of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be given again.", show_default=False)
    ] = None,
    backend: Annotated[str, typer.Option(help="What runs the graphs: onnxruntime, tensorrt, tensorrt-rtx, tensorrt-10.3.")] = "onnxruntime",
    device: Annotated[str | None, typer.Option(help="With onnxruntime: cpu or cuda. Default: cpu.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Draw the ring at the foot of the terminal.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve metrics for Prometheus there; 0: any free port. Default: do not.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, or chat, for as long as you like in constant memory."""
    with needs_extra("cli", "run"):
        from sinkring.exporter.cli_run import RunOptions, run_chat, run_prompt
    from sinkring.runtime.errors import InputError
    from sinkring.runtime.sampling import SamplingOptions

    sampling = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    options = RunOptions(tokens, sampling, tuple(stop or ()), backend, threads, as_json, watch, metrics_port, device)
    if chat and prompt is not None:
        raise InputError("--prompt and --chat are given: a chat takes its turns from stdin; leave one of them out")
    if chat:
        run_chat(bundle, options)
    else:
        run_prompt(bundle, prompt, options)


@app.command("validate")
def validate_command(
    bundle: BundleArgument,
    steps: Annotated[int | None, typer.Option(help="Tokens to compare. Default: 1024.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Where the model is now. Default: as exported.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the graphs of this target. Default: of all in the bundle.", show_default=False)
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="quick or full: check every invariant of a stream in place of the logits alone.", show_default=False),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="With --suite, what runs the graphs. Default: onnxruntime.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="INVARIANT", help="With --suite, only this one; may be given again.", show_default=False)
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --suite, most time for the steps that must not grow. Default: 900.", show_default=False),
    ] = None,
    sabotage: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove a bundle against eager PyTorch, step by step and past the ring's wraps. Exit status 1 if it fails."""
    with needs_extra("export", "validate"):
        from sinkring.exporter.validate import validate_bundle
    from sinkring.exporter.cli_conformance import print_conformance, print_saboteurs
    from sinkring.exporter.cli_validate import print_validation
    from sinkring.runtime.errors import InputError

    if sabotage == "list":
        print_saboteurs()
        return
    of_suite = {"--backend": backend, "--only": only, "--budget": budget, "--sabotage": sabotage}
    others = of_suite if suite is None else {"--steps": steps, "--target": target}
    if useless := [name for name, value in others.items() if value not in (None, [])]:
        why = "does nothing without --suite: add --suite quick" if suite is None else "does nothing with --suite: leave one of the two out"
        raise InputError(f"{useless[0]} {why}")
    found: Any
    with progress_bars() as progress:
        if suite is None:
            found = validate_bundle(bundle, 1024 if steps is None else steps, model=model, target=target, progress=progress)
        else:
            from sinkring.exporter.conformance.suite import BUDGET_S, check_conformance

            found = check_conformance(
                bundle,
                suite,
                backend=backend or "onnxruntime",
                model=model,
                only=only,
                budget_s=BUDGET_S if budget is None else budget,
                sabotage=sabotage,
                progress=progress,
            )
    if as_json:
        print_json(json.loads(found.to_json()))
    elif suite is None:
        print_validation(found)
    else:
        print_conformance(found)
    if not found.passed:
        raise typer.Exit(VALIDATION_FAILED)


@app.command("inspect")
def inspect_command(bundle: BundleArgument, as_json: JsonOption = False) -> None:
    """Show what a bundle holds, and hold its parts against one another."""
    with needs_extra("export", "inspect"):
        from sinkring.exporter.inspect import inspect_bundle
    from sinkring.exporter.cli_inspect import print_inspection

    found = inspect_bundle(bundle)
    if as_json:
        print_json(found.to_dict())
    else:
        print_inspection(found)


@app.command("families")
def families_command(as_json: JsonOption = False) -> None:
    """Show which model families are exported, how each is run, and which architectures are refused."""
    with needs_extra("export", "families"):
        from sinkring.exporter.family_table import HEADINGS, REFUSED_HEADINGS, list_families, list_refused

    rows, refused = list_families(), list_refused()
    if as_json:
        print_json({"families": [dataclasses.asdict(row) for row in rows], "refused": [dataclasses.asdict(row) for row in refused]})
        return
    print_table(HEADINGS, [row.cells() for row in rows])
    print()
    print_table(REFUSED_HEADINGS, [row.cells() for row in refused], title="refused")


@app.command("doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """Show what this machine has, what it lacks, and how to get it."""
    from sinkring.exporter.doctor import diagnose

    found = diagnose()
    if as_json:
        print_json(found.to_dict())
    else:
        print_table(("item", "state", "found", "advice"), [(row.item, row.state, row.found, row.advice) for row in found.rows()])


def parse_sms(text: str) -> tuple[int, ...]:
    """ "89,120" -> (89, 120), each once. Raises InputError that names the part that is no number."""
    from sinkring.runtime.errors import InputError

    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise InputError(f"--sm {text!r}: {part!r} is not a compute capability; write 10 x major + minor, with commas between: 89,120")
    return tuple(dict.fromkeys(map(int, parts)))
