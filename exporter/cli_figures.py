"""The commands that measure what a bundle is worth: perplexity, report, compare, compare-weights, bench."""

from pathlib import Path
from typing import Annotated

import typer
from sinkring.exporter.cli_app import VALIDATION_FAILED, BundleArgument, JsonOption, app
from sinkring.exporter.cli_faults import needs_extra
from sinkring.exporter.cli_output import print_json, progress_bars


@app.command("perplexity")
def perplexity_command(
    source: Annotated[str, typer.Argument(metavar="BUNDLE|MODEL", help="A bundle, or a model as `export` takes it.")],
    text: Annotated[str, typer.Option(metavar="FILE", help="UTF-8 text, or by name: topics, kjv.", show_default=False)],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, window, recompute, streaming, native or oracle; may be given again. Default: the first five.", show_default=False
        ),
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="Of a model. Default: 4.", show_default=False)] = None,
    window: Annotated[int | None, typer.Option(help="Of a model. Default: 256.", show_default=False)] = None,
    starts: Annotated[int, typer.Option(help="Pieces of the text, evenly spread.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each piece.")] = 1280,
    recompute_every: Annotated[int, typer.Option(help="Policy recompute scores one token in so many.")] = 64,
    bundles: Annotated[str, typer.Option(metavar="FOLDER", help="Where other configurations are exported to.")] = "bundles/perplexity",
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write the curve there: perplexity.csv and perplexity.png.", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare ways of keeping a long text's past by how well the model predicts it: all, a window, sinks and a window."""
    with needs_extra("export", "perplexity"):
        from sinkring.exporter.perplexity import measure_perplexity
        from sinkring.exporter.perplexity_policies import POLICIES
    from sinkring.exporter.cli_perplexity import print_perplexity
    from sinkring.exporter.perplexity_files import PNG_NAME, write_curves
    from sinkring.exporter.picture import check_picture

    if out:
        check_picture(Path(out) / PNG_NAME)
    with progress_bars() as progress:
        found = measure_perplexity(
            source,
            text,
            policies=policy or POLICIES,
            sinks=sinks,
            window=window,
            starts=starts,
            tokens=tokens,
            recompute_every=recompute_every,
            bundles=bundles,
            threads=threads,
            progress=progress,
        )
    files = [str(path) for path in write_curves(found, Path(out))] if out else []
    if as_json:
        print_json({**found.to_dict(), "files": files})
    else:
        print_perplexity(found)
        for path in files:
            print(path)


@app.command("report")
def report_command(
    bundle: BundleArgument,
    out: Annotated[str, typer.Option(metavar="FILE", help="The HTML file to write.")] = "report.html",
    steps: Annotated[int, typer.Option(help="Tokens to compare with eager PyTorch; 0: none.")] = 700,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Measure the perplexity on it: UTF-8, or topics, kjv. Default: do not.", show_default=False),
    ] = None,
    bundles: Annotated[str, typer.Option(metavar="FOLDER", help="Where the perplexity's configurations go.")] = "bundles/perplexity",
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page about a bundle: its ring drawn, parity, speed, memory, perplexity, engine plans."""
    with needs_extra("export", "report"):
        from sinkring.exporter.report.write import write_report

    with progress_bars() as progress:
        facts = write_report(bundle, out, steps=steps, text=text, bundles=bundles, threads=threads, progress=progress)
    passed = facts.validation.passed if facts.validation else None
    if as_json:
        print_json(
            {"report": out, "passed": passed, "tokens_per_second": 1e3 / facts.speed.median_ms, "cache_bytes": facts.speed.cache_bytes}
        )
    else:
        print(out)
    if passed is False:
        raise typer.Exit(VALIDATION_FAILED)


@app.command("compare")
def compare_command(
    bundle: BundleArgument,
    runners: Annotated[
        str, typer.Option(help="The first is the reference: onnxruntime[:no-optimizer][:FORM], tensorrt-rtx, tensorrt.")
    ] = "onnxruntime,tensorrt-rtx",
    against: Annotated[
        str | None, typer.Option(metavar="BUNDLE", help="All runners but the first run this bundle.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What the free run goes on from. Default: the text's first tokens.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens of a text, fed to all.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of the free run: each runner's own likeliest ones.")] = 32,
    tolerance: Annotated[float | None, typer.Option(help="Of max |logit|. Default: that of `validate`.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runtimes, settings or forms of a step, and find the first layer that differs. Exit status 1 if the logits do."""
    with needs_extra("export", "compare"):
        from sinkring.exporter.compare import compare_runners
    from sinkring.exporter.cli_compare import print_comparison

    with progress_bars() as progress:
        found = compare_runners(
            bundle,
            runners.split(","),
            against=against,
            prompt=prompt,
            steps=steps,
            tokens=tokens,
            tolerance=tolerance,
            threads=threads,
            progress=progress,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_comparison(found)
    if not found.passed:
        raise typer.Exit(VALIDATION_FAILED)


@app.command("compare-weights")
def compare_weights_command(
    bundle: BundleArgument,
    against: Annotated[
        str, typer.Option(metavar="BUNDLE", help="The reference: the same model and caches, as a rule fp32.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of text to score.")] = 2048,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what weights of 4 or 8 bits cost: perplexity, KL and top-1 agreement on real text, next to the bytes."""
    with needs_extra("export", "compare-weights"):
        from sinkring.exporter.compare_weights import compare_weights
    from sinkring.exporter.cli_weights import print_weight_comparison

    with progress_bars() as progress:
        found = compare_weights(bundle, against, tokens=tokens, threads=threads, progress=progress)
    if as_json:
        print_json(found.to_dict())
    else:
        print_weight_comparison(found)


@app.command("bench")
def bench_command(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Folders made by `sinkring export`.", show_default=False)],
    backend: Annotated[str, typer.Option(help="What runs the graphs: onnxruntime, tensorrt-rtx or tensorrt.")] = "onnxruntime",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the backend's own.", show_default=False)] = None,
    target: Annotated[str | None, typer.Option(help="Graphs lowered for this target. Default: the backend's.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    rounds: Annotated[int, typer.Option(help="Turns of all that is measured.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps at each position in a turn.")] = 20,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt whose reading is timed.")] = 512,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the steps by position: a PNG.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure steps at any age, prompts, memory and host work, beside the memory bandwidth; several bundles take turns."""
    with needs_extra("export", "bench"):
        from sinkring.exporter.bench.measure import bench_bundles
    from sinkring.exporter.bench.plot import draw_bench
    from sinkring.exporter.cli_bench import print_bench
    from sinkring.exporter.picture import check_picture

    if plot:
        check_picture(Path(plot))
    with progress_bars() as progress:
        found = bench_bundles(
            bundles,
            backend=backend,
            device=device,
            target=target,
            threads=threads,
            rounds=rounds,
            steps=steps,
            prompt=prompt,
            progress=progress,
        )
    drawn = str(draw_bench(found, Path(plot))) if plot else None
    if as_json:
        print_json({**found.to_dict(), "plot": drawn})
        return
    print_bench(found)
    if drawn:
        print(drawn)
