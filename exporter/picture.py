"""Pictures: the one place that loads matplotlib for the command line, and that says what is wrong with a place for them."""

import os
from pathlib import Path
from typing import Any

from sinkring.runtime.errors import DependencyError, InputError


def new_picture() -> tuple[Any, Any]:
    """A matplotlib Figure and its Axes. Raises DependencyError without the package."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DependencyError("pictures need the package matplotlib: pip install 'sinkring[plots]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def save_picture(figure: Any, path: Path) -> Path:
    """Write a PNG, or what the name ends in, and the folder if need be. Raises InputError for a file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error
    return path


def check_picture(path: Path) -> None:
    """Raises what `new_picture` and `save_picture` would, and touches nothing: for before what is to be drawn is measured for minutes."""
    figure, _ = new_picture()
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise _refusal(path, "is a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise _refusal(path, f"{folder} is no writable folder")
    if path.suffix and path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise _refusal(path, f"unknown kind of picture {path.suffix}")


def _refusal(path: Path, reason: object) -> InputError:
    return InputError(f"{path}: cannot be written ({reason}); give a path that ends in .png, in a writable folder")
