"""What the tests of export_decoder share."""

from typing import Any

import pytest
from sinkring.exporter import export as exporting

TINY: dict[str, Any] = {"sinks": 2, "window": 4, "chunk": 4}


def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> None:
        pytest.fail("the model was loaded before the option was looked at")

    monkeypatch.setattr(exporting, "load_model", load)
