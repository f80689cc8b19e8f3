"""sinkring.exporter: a trained decoder -> a bundle, an engine, a proof. Names are loaded at first use: this import stays light."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkring.exporter.build import build_engine
    from sinkring.exporter.conformance.suite import check_conformance
    from sinkring.exporter.export import export_decoder
    from sinkring.exporter.perplexity import measure_perplexity
    from sinkring.exporter.report.write import write_report
    from sinkring.exporter.validate import validate_bundle

_HOMES = {
    "export_decoder": "sinkring.exporter.export",
    "build_engine": "sinkring.exporter.build",
    "check_conformance": "sinkring.exporter.conformance.suite",
    "measure_perplexity": "sinkring.exporter.perplexity",
    "validate_bundle": "sinkring.exporter.validate",
    "write_report": "sinkring.exporter.report.write",
}

__all__ = ["build_engine", "check_conformance", "export_decoder", "measure_perplexity", "validate_bundle", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
