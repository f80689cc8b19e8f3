"""A measured perplexity as files: the log-perplexity against the position, as CSV and as a picture."""

import csv
from pathlib import Path

from sinkring.exporter.perplexity import Perplexity
from sinkring.exporter.picture import new_picture, save_picture

CSV_NAME, PNG_NAME = "perplexity.csv", "perplexity.png"


def write_curves(found: Perplexity, folder: Path, bins: int = 40) -> tuple[Path, Path]:
    """Write both into `folder`, which is made. Raises DependencyError without the package matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CSV_NAME).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "from_position", "to_position", "log_perplexity_nats", "standard_error_nats"))
        for policy in found.losses:
            for start, stop, mean, error in found.curve(policy, bins):
                writer.writerow((policy, start, stop, f"{mean:.5f}", f"{error:.5f}"))
    return folder / CSV_NAME, draw_curves(found, folder / PNG_NAME, bins)


def draw_curves(found: Perplexity, path: Path, bins: int = 40) -> Path:
    """The picture alone: a line for each policy, with a band of one standard error."""
    figure, axes = new_picture()
    for policy in found.losses:
        rows = found.curve(policy, bins)
        places = [(start + stop) / 2 for start, stop, _, _ in rows]
        means, errors = [row[2] for row in rows], [row[3] for row in rows]
        (line,) = axes.plot(places, means, label=policy, linewidth=1.5, marker="." if policy == "recompute" else None)
        low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axvline(found.first_scored, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate(" cache full", (found.first_scored, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color="grey")
    axes.set(xlabel="position in the text, tokens", ylabel="log-perplexity, nats a token")
    model, text = Path(found.model).name, Path(found.text).name
    axes.set_title(f"{model}, S={found.sinks}, W={found.window}, {len(found.start_positions)} starts in {text}")
    axes.legend()
    return save_picture(figure, path)
