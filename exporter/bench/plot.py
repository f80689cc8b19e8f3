"""A benchmark as a picture: does a step's time depend on the position, and what bounds it?"""

from pathlib import Path

from sinkring.exporter.bench.measure import Bench
from sinkring.exporter.picture import new_picture, save_picture


def draw_bench(found: Bench, path: Path) -> Path:
    """Write a PNG: step time by position, a line for each bundle with its middle half, and dotted the time that reading memory takes.

    Raises DependencyError without the package matplotlib, InputError for a file that cannot be written.
    """
    figure, axes = new_picture()
    for cost in found.bundles:
        places = sorted(cost.step_ms)
        spreads = [cost.step_ms[place] for place in places]
        medians = [spread.median for spread in spreads]
        label = f"{Path(cost.bundle).name}, B={cost.batch}"
        (line,) = axes.plot(places, medians, marker="o", label=label)
        axes.fill_between(
            places, [spread.p25 for spread in spreads], [spread.p75 for spread in spreads], color=line.get_color(), alpha=0.15
        )
        if cost.floor_ms is not None:
            axes.axhline(cost.floor_ms.median, color=line.get_color(), linestyle=":", linewidth=1)
    # Position 0 has no logarithm: up to the shortest ring the axis is linear.
    axes.set_xscale("symlog", linthresh=max(min(cost.full_position for cost in found.bundles), 1))
    axes.set_ylim(bottom=0)
    bound = "; dotted: reading weights and cache once at the measured bandwidth" if found.bandwidth else ""
    axes.set(xlabel="position in the stream, tokens", ylabel="a step, ms")
    axes.set_title(f"{found.machine.cpu}, {found.threads} threads{bound}", fontsize=9)
    axes.legend()
    return save_picture(figure, path)
