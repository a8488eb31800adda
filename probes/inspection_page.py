"""What a probe pool says, as an HTML document of its own: no script, nothing loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from probes.inspection import FEW, Cell, Group, HeatMap, Inspection
from probes.inspection_text import (
    Measure,
    answers,
    by_control,
    gain_interval,
    heading,
    most_probed,
    percent,
    relation,
    sections,
)
from splice.records import NodeId
from splice.report.html import environment
from splice.statistics import Gain

if TYPE_CHECKING:
    import jinja2

_SHOWN: Final = 2000
"""Characters of a text that the page shows."""
_PALEST: Final = 0.06
_DEEPEST: Final = 0.55
"""Opacity of the colour of a cell, for no effect and the largest: text stays legible on it."""
_ROOM: Final = 1.05
"""Length of a track over that of the longest interval on it."""
_LEAST_SHARE: Final = 0.1
_LEAST_CHANGE: Final = 0.05
"""Where the scale of a grid ends at least, lest small effects look large."""


class Bar(NamedTuple):
    """A difference with its interval, in percent of the width of a track with 0 in the middle."""

    label: str
    text: str
    relation: str
    left: float
    width: float
    middle: float


class Plot(NamedTuple):
    """Edges against each control, by one measure."""

    title: str
    scale: str
    """What the ends of the track stand for."""
    bars: tuple[Bar, ...]


class Square(NamedTuple):
    """One edge in a grid."""

    value: str
    n: str
    tone: str
    """Name of the colour."""
    opacity: float
    is_faint: bool
    """Too few probes to say much."""


class Grid(NamedTuple):
    """Edges of one workload: sources down, receivers across."""

    title: str
    low: tuple[str, str, float]
    high: tuple[str, str, float]
    """Label, tone and opacity of both ends of the scale."""
    receivers: tuple[NodeId, ...]
    rows: tuple[tuple[NodeId, tuple[Square | None, ...]], ...]


def inspection_page(inspection: Inspection) -> str:
    """A pool as a self-contained page, light or dark as its reader has it."""
    shown = sections(inspection)
    maps = iter(inspection.heat_maps)
    return (
        _environment()
        .get_template("inspection.html.j2")
        .render(
            title=heading(inspection),
            pool=shown[0],
            answers=answers(inspection),
            plots=_plots(inspection),
            few=FEW,
            parts=[
                (section, _grids(next(maps)) if section.key == "edges" else ())
                for section in shown[1:]
            ],
        )
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return environment("probes", _clipped)


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _plots(inspection: Inspection) -> list[Plot]:
    """The differences that have an interval."""
    comparisons = by_control(inspection)
    answer = [(_label(c.control, c.workload), c.decisive) for c in comparisons]
    score = [(_label(c.control, c.workload), c.change) for c in comparisons]
    plots = (
        _plot("Share of changed answers, edge less control", "answer", answer),
        _plot("Mean score change, edge less control", "score", score),
    )
    return [plot for plot in plots if plot.bars]


def _label(control: str, workload: str | None) -> str:
    return f"against {control}" if workload is None else f"against {control}, {workload}"


def _plot(title: str, measure: Measure, rows: Sequence[tuple[str, Gain]]) -> Plot:
    shown = [(label, gain) for label, gain in rows if gain.n >= FEW]
    ends = [abs(end) for _, gain in shown for end in (gain.interval.low, gain.interval.high)]
    limit = _ROOM * (max(ends, default=0.0) or 1.0)
    bars = []
    for label, gain in shown:
        low, high = (_place(end, limit) for end in (gain.interval.low, gain.interval.high))
        value = f"{100 * gain.mean:+.1f}" if measure == "answer" else f"{gain.mean:+.3f}"
        bars.append(
            Bar(
                label=label,
                text=f"{value} {gain_interval(gain, measure)}, {gain.n:,} questions",
                relation=relation(gain).removesuffix(" than").removesuffix(" from"),
                left=low,
                width=high - low,
                middle=_place(gain.mean, limit),
            )
        )
    scale = f"{100 * limit:.1f} points" if measure == "answer" else f"{limit:.3f}"
    return Plot(title, scale, tuple(bars))


def _place(value: float, limit: float) -> float:
    return 50.0 + 50.0 * value / limit


def _grids(heat_map: HeatMap) -> tuple[Grid, ...]:
    cells = most_probed(heat_map)
    enough = [cell.probes for cell in cells if cell.probes.n_done >= FEW]
    measured = enough or [cell.probes for cell in cells]
    most = max(_LEAST_SHARE, *map(_share, measured))
    largest = max(_LEAST_CHANGE, *(abs(_change(group)) for group in measured))
    return (
        _grid(
            "Share of decisive probes",
            heat_map,
            cells,
            lambda group: _square(group, percent(group.decisive), _share(group) / most),
            (("0%", "more", _PALEST), (f"{most:.0%}", "more", _DEEPEST)),
        ),
        _grid(
            "Mean score change",
            heat_map,
            cells,
            lambda group: _square(group, f"{_change(group):+.3f}", _change(group) / largest),
            ((f"{-largest:+.3f}", "less", _DEEPEST), (f"{largest:+.3f}", "more", _DEEPEST)),
        ),
    )


def _share(group: Group) -> float:
    return 0.0 if group.decisive is None else group.decisive.value


def _change(group: Group) -> float:
    return 0.0 if group.change is None else group.change.value


def _square(group: Group, value: str, strength: float) -> Square:
    """A cell of a grid; strength in [-1, 1] for what the scale is made of, beyond it otherwise."""
    opacity = _PALEST + (_DEEPEST - _PALEST) * min(1.0, abs(strength))
    is_faint = group.n_done < FEW
    return Square(
        value=value if group.n_done else "-",
        n=f"n={group.n_done:,}",
        tone="less" if strength < 0 else "more",
        opacity=opacity / 4 if is_faint else opacity,
        is_faint=is_faint,
    )


def _grid(
    title: str,
    heat_map: HeatMap,
    cells: Sequence[Cell],
    square: Callable[[Group], Square],
    ends: tuple[tuple[str, str, float], tuple[str, str, float]],
) -> Grid:
    by_ends = {(cell.source, cell.receiver): square(cell.probes) for cell in cells}
    sources, receivers = ({ends[side] for ends in by_ends} for side in (0, 1))
    across = tuple(node for node in heat_map.nodes if node in receivers)
    rows = tuple(
        (source, tuple(by_ends.get((source, receiver)) for receiver in across))
        for source in heat_map.nodes
        if source in sources
    )
    return Grid(title, *ends, across, rows)
