"""A decoder's metrics as a text page for Prometheus, served from a thread of its own. Needs the package prometheus-client."""

from collections.abc import Callable, Iterator
from typing import Any

from sinkring.runtime.decoder import Decoder
from sinkring.runtime.errors import DependencyError, InputError

_GAUGES = {
    "tokens_per_second": "Tokens per second of the latest calls of the model.",
    "cache_bytes": "Bytes of all state tensors: constant.",
}
_COUNTERS = {
    "tokens": "Tokens read or generated.",
    "wraps": "How often a stream's first ring has begun anew.",
    "resets": "Resets of streams.",
    "refusals": "Calls that were refused.",
    "numerical_alarms": "Streams stopped because their logits were not finite or exploded.",
}


def serve_metrics(decoder: Decoder, port: int, address: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Serve http://address:port/metrics until the second thing returned is called; the first is the port, chosen by the system for 0.

    Raises DependencyError without the package prometheus-client, InputError for a port that cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise DependencyError("metrics need the package prometheus-client: pip install 'sinkring[metrics]'") from None

    class Collector:
        """Asked by the server's thread. It reads numbers that the decoder's thread writes, each whole in itself."""

        def collect(self) -> Iterator[Any]:
            found = decoder.metrics()
            position = GaugeMetricFamily("sinkring_position", "Tokens in each open stream.", labels=["row"])
            for row, tokens in found.positions.items():
                position.add_metric([str(row)], tokens)
            yield position
            step = GaugeMetricFamily("sinkring_step_seconds", "Time of the latest decode calls.", labels=["quantile"])
            for quantile, milliseconds in (("0.5", found.step_p50_ms), ("0.99", found.step_p99_ms)):
                if milliseconds is not None:
                    step.add_metric([quantile], milliseconds / 1e3)
            yield step
            for name, text in _GAUGES.items():
                if (value := getattr(found, name)) is not None:
                    yield GaugeMetricFamily(f"sinkring_{name}", text, value=value)
            for name, text in _COUNTERS.items():
                yield CounterMetricFamily(f"sinkring_{name}", text, value=getattr(found, name))

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise InputError(f"metrics at {address}:{port}: cannot be served ({error}); choose another port") from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_port), close
