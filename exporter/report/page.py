"""The report's HTML: sections of tables and drawings, one style sheet, nothing from elsewhere."""

from collections.abc import Sequence
from html import escape

from sinkring.exporter.report.charts import Line, line_chart, ring_drawing, ring_frames
from sinkring.exporter.report.facts import Facts
from sinkring.runtime.ring import RingGeometry

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --card: #f6f8fa; --line: #d0d7de;
  --c0: #0969da; --c1: #cf222e; --c2: #1a7f37; --c3: #9a6700; --c4: #8250df; --c5: #57606a; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --card: #161b22; --line: #30363d;
  --c0: #58a6ff; --c1: #ff7b72; --c2: #3fb950; --c3: #d29922; --c4: #bc8cff; --c5: #9198a1; --good: #3fb950; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--soft); margin: .3rem 0; } figure { margin: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.figures td { white-space: nowrap; }
svg { width: 100%; max-width: 44rem; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; }
polyline.c0 { stroke: var(--c0); } polyline.c1 { stroke: var(--c1); } polyline.c2 { stroke: var(--c2); }
polyline.c3 { stroke: var(--c3); } polyline.c4 { stroke: var(--c4); } polyline.c5 { stroke: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .4rem; }
i.c0, i.window { background: var(--c0); } i.c1 { background: var(--c1); } i.c2 { background: var(--c2); }
i.c3, i.sink { background: var(--c3); } i.c4 { background: var(--c4); } i.c5 { background: var(--c5); }
i.forgotten { background: var(--line); } i.empty { border: 1px dashed var(--soft); } i.head { border: 3px solid var(--c1); }
.ring { display: flex; flex-wrap: wrap; gap: 4px; } .ring span { min-width: 2.4rem; height: 2rem; line-height: 1.75rem; padding: 0 .2rem;
  text-align: center; font-size: .75rem; border-radius: .25rem; border: 2px solid transparent; color: var(--paper); }
.ring .sink { background: var(--c3); } .ring .window { background: var(--c0); }
.ring .forgotten { background: var(--line); color: var(--soft); }
.ring .empty { border: 1px dashed var(--soft); } .ring .head { border: 3px solid var(--c1); }
"""


def render_page(facts: Facts) -> str:
    """The whole page."""
    manifest = facts.inspection.manifest
    title = f"{manifest.model.architecture}, {manifest.policy}, {_ring_words(manifest.rings[0].geometry)}"
    sections = [_summary(facts), _exported(facts), _ring(facts), _parity(facts), _speed(facts), _perplexity(facts), _plans(facts)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _summary(facts: Facts) -> str:
    validation = facts.validation
    parity = "not compared"
    if validation:
        parity = '<b class="good">agrees</b>' if validation.passed else '<b class="bad">DIFFERS</b>'
    manifest = facts.inspection.manifest
    tiles = (
        (f"<b>{facts.inspection.cache_bytes / 1e6:,.1f} MB</b>", "cache, the same at every age"),
        (f"<b>{manifest.model.weight_bytes / 1e6:,.1f} MB</b>", f"weights, {escape(manifest.dtype)}"),
        (f"<b>{1e3 / facts.speed.median_ms:,.1f} tokens/s</b>", "one stream, at a full cache"),
        (parity if validation else f"<b>{parity}</b>", "with eager PyTorch"),
    )
    return f'<div class="tiles">{"".join(f"<div class=tile>{figure}{text}</div>" for figure, text in tiles)}</div>'


def _exported(facts: Facts) -> str:
    manifest, model = facts.inspection.manifest, facts.inspection.manifest.model
    rows = (
        ("model", f"{model.architecture} from {model.source}, sha256 {model.source_sha256[:16]}"),
        (
            "sizes",
            f"{model.layers} layers, hidden {model.hidden_size}, {model.query_heads} query and {model.kv_heads} key heads of "
            f"{model.head_size}, vocabulary {model.vocab_size:,}, trained for {model.trained_context_tokens:,} tokens",
        ),
        ("policy", manifest.policy),
        ("streams, longest call", f"{manifest.batch}, {manifest.chunk} tokens"),
        ("graphs", "; ".join(f"{graph.path}: {graph.nodes} nodes, opset {graph.opset}" for graph in facts.inspection.graphs)),
        ("made with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.made_with.items()))),
        ("measured on", f"{facts.machine.cpu}, {facts.machine.cores} cores, {facts.machine.system}, {facts.machine.python}"),
    )
    return _section("What was exported", _table((), rows))


def _ring(facts: Facts) -> str:
    legend = "".join(
        f'<span><i class="{kind}"></i>{text}</span>'
        for kind, text in (
            ("sink", "sink, kept for ever"),
            ("window", "in the window"),
            ("forgotten", "out of the window, not yet overwritten"),
            ("empty", "empty"),
            ("head", "newest token"),
        )
    )
    parts = []
    for ring in facts.inspection.manifest.rings:
        geometry = ring.geometry
        parts.append(
            f"<p>{escape(_ring_words(geometry))}: M={geometry.slots}, C={geometry.capacity} slots, in {len(ring.layers)} layers.</p>"
        )
        for words, position in ring_frames(geometry):
            caption = f"<figcaption>after token {position:,}: {escape(words)}</figcaption>"
            parts.append(f"<figure>{caption}{ring_drawing(geometry, position)}</figure>")
    return _section("Which token is in which slot", f'<p class="legend">{legend}</p>' + "".join(parts))


def _parity(facts: Facts) -> str:
    found = facts.validation
    if found is None:
        return _section("Against eager PyTorch", "<p>Not compared: make the report with --steps.</p>")
    headings = ("run", "region", "positions", "max |Δlogit|", "mean |Δlogit|", "max KL", "same best token")
    rows = [
        (
            row.run,
            row.region,
            f"{row.start} to {row.stop - 1}",
            f"{row.max_error:.2e}",
            f"{row.mean_error:.2e}",
            f"{row.kl_max:.2e}",
            f"{row.top1:.2%}",
        )
        for row in found.regions
    ]
    words = f"{found.steps:,} tokens of {found.ids}; tolerance {found.tolerance:.3g} on logits of up to {found.scale:.3g}."
    controls = [
        (control.name, f"{control.max_error:.3g}", "told apart" if control.told_apart else "NOT told apart") for control in found.controls
    ]
    wrong = _table(("what a wrong model would show", "max |Δlogit|", ""), controls) if controls else ""
    failed = "".join(f'<p class="bad">{escape(line)}</p>' for line in found.failures)
    return _section("Against eager PyTorch", f"<p>{escape(words)}</p>{failed}{_table(headings, rows)}{wrong}")


def _speed(facts: Facts) -> str:
    speed = facts.speed
    rows = (
        ("a decode step, median", f"{speed.median_ms:.2f} ms"),
        ("99th percentile", f"{speed.p99_ms:.2f} ms"),
        ("reading a prompt", f"{speed.prefill_tokens_per_second:,.0f} tokens/s"),
        ("resident memory, first to last step", f"{(speed.memory[-1][1] - speed.memory[0][1]) / 1e6:+,.2f} MB"),
    )
    curves = (
        Line("resident memory of the process", [(position, resident / 1e6) for position, resident in speed.memory]),
        Line("cache", [(position, speed.cache_bytes / 1e6) for position, _ in speed.memory]),
    )
    chart = line_chart(curves, "position in the stream, tokens", "MB", from_zero=True)
    return _section("Speed and memory", _table((), rows) + chart)


def _perplexity(facts: Facts) -> str:
    found = facts.perplexity
    if found is None:
        return _section("Perplexity", "<p>Not measured: make the report with --text.</p>")
    rows = []
    for policy in found.losses:
        own, other = found.estimate(policy), found.compare(policy, found.reference)
        ratio = f"{other.factor:.4f} ± {other.factor_error:.4f}"
        rows.append((policy, f"{own.nats:.4f} ± {own.standard_error:.4f}", f"{own.factor:.2f}", ratio))
    headings = ("policy", "log-perplexity, nats", "perplexity", f"over that of {found.reference}")
    lines = [Line(policy, [((start + stop) / 2, mean) for start, stop, mean, _ in found.curve(policy, bins=32)]) for policy in found.losses]
    words = (
        f"{len(found.start_positions)} starts of {found.tokens:,} tokens in {found.text}; the cache is full from {found.first_scored:,} on."
    )
    chart = line_chart(lines, "position in the text, tokens", "nats a token")
    return _section("Perplexity", f"<p>{escape(words)}</p>{_table(headings, rows)}{chart}")


def _plans(facts: Facts) -> str:
    engines = facts.inspection.engines
    if not engines:
        return _section("Engine plans", "<p>The bundle has no engines: sinkring build makes them.</p>")
    headings = ("engine", "kernels", "caches in place", "attention", "cache-sized copies", "bytes", "")
    rows = [
        (
            engine.summary.path,
            f"{engine.summary.kernels:,}",
            f"{engine.summary.updates_in_place} of {engine.summary.updates}",
            engine.summary.attention,
            f"{engine.summary.copies:,}",
            f"{engine.summary.engine_bytes:,}",
            "stale: build it again" if engine.stale else "",
        )
        for engine in engines
    ]
    return _section("Engine plans", _table(headings, rows))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(heading)}</th>' for heading in headings)}</tr>" if headings else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table{" class=figures" if headings else ""}>{head}{body}</table></div>'


def _ring_words(geometry: RingGeometry) -> str:
    if not geometry.wraps:
        return f"linear cache of {geometry.window_tokens:,} tokens"
    return f"S={geometry.sinks_tokens} W={geometry.window_tokens}"
