"""write_report: gather the facts and write the page."""

from collections.abc import Callable
from pathlib import Path

from sinkring.exporter.report.facts import Facts, gather_facts
from sinkring.exporter.report.page import render_page
from sinkring.runtime.errors import InputError


def write_report(
    bundle: str | Path,
    out: str | Path,
    *,
    steps: int = 700,
    text: str | None = None,
    bundles: str | Path = "bundles/perplexity",
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Facts:
    """Write one self-contained HTML file about a bundle: what it is, how its ring turns, parity, speed, memory, perplexity, plans.

    steps: tokens to compare with eager PyTorch, 0 to leave that out. text: a text to measure the perplexity on, None to leave that out;
    bundles: where the configurations are kept that it needs. Returns what is on the page.
    Raises InputError for an `out` that cannot be written, and what `gather_facts` raises.
    """
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path}: is a folder, or in one that is not there; give the path of an HTML file")
    facts = gather_facts(Path(bundle), steps=steps, text=text, bundles=Path(bundles), threads=threads, progress=progress)
    try:
        path.write_text(render_page(facts), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); give a path in a writable folder") from error
    return facts
