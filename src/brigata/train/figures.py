"""The report's figures, each a piece of HTML that expects plotly.js on its page."""

from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
from numpy.typing import NDArray

ACCENT, HELD_OUT, TRIGRAM = "#2f6fdf", "#0b8a78", "#b8650a"
INK, MUTED, RULE = "#1c2330", "#667085", "#e6e9ef"
FONT = 'Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", Arial, sans-serif'
SHARE_COLOURS = {
    "compute": ACCENT,
    "exposed tensor-parallel": "#e5484d",
    "exposed data-parallel": "#f5a524",
    "optimizer": "#12a594",
    "data": "#98a2b3",
}
OTHER_COLOURS = ("#8e4ec6", "#d6409f", "#978365", "#5b5bd6", "#30a46c")


def loss_figure(steps: list[dict[str, Any]], held_out: float | None, trigram: float | None) -> str:
    """Loss of each step, its running mean, and lines for the held-out and the trigram loss (nats a token)."""
    x, y = [step["step"] for step in steps], np.array([step["loss"] for step in steps], float)
    width = len(y) // 40
    figure = _figure(height=340, right=150)
    if width < 2:
        figure.add_scatter(x=x, y=y, line={"color": ACCENT, "width": 2}, mode=_mode(y), name="loss")
    else:
        pale = {"color": "#b4cdf6", "width": 1}
        figure.add_scatter(x=x, y=y, line=pale, mode="lines", name="each step")
        strong = {"color": ACCENT, "width": 2.4}
        figure.add_scatter(x=x, y=_running_mean(y, width), line=strong, mode="lines", name="running mean")
        figure.update_layout(
            showlegend=True, legend={"x": 1, "xanchor": "right", "y": 1, "bgcolor": "rgba(0,0,0,0)"}
        )
    lines = [(held_out, "held-out", HELD_OUT), (trigram, "trigram table", TRIGRAM)]
    known = sorted((value, label, colour) for value, label, colour in lines if value is not None)
    for place, (value, label, colour) in enumerate(known):
        figure.add_hline(value, line={"color": colour, "width": 1.5, "dash": "dash"})
        figure.add_annotation(
            text=f"<b>{value:.3f}</b> {label}",
            x=1,
            xref="paper",
            xanchor="left",
            xshift=8,
            y=value,
            yanchor="middle" if _apart(known, y) else ("top", "bottom")[place],
            showarrow=False,
            font={"color": colour, "size": 13},
        )
    figure.update_xaxes(
        title={"text": "step", "standoff": 6, "font": {"size": 13}}, dtick=1 if len(y) <= 10 else None
    )
    figure.update_layout(margin={"b": 52})
    return _html(figure, "loss")


def line_figure(steps: list[dict[str, Any]], key: str) -> str:
    """One quantity of ``metrics.jsonl`` over the steps."""
    y = np.array([step[key] for step in steps], float)
    figure = _figure(height=210, right=8)
    figure.add_scatter(
        x=[step["step"] for step in steps], y=y, line={"color": ACCENT, "width": 1.6}, mode=_mode(y), name=key
    )
    figure.update_xaxes(dtick=1 if len(y) <= 10 else None)
    figure.update_yaxes(rangemode="tozero")
    return _html(figure, key.replace("_", "-"))


def time_figure(time_per_rank_s: list[dict[str, float]]) -> str:
    """One stacked bar a rank: the shares of a step (median seconds) in the order in which they were told."""
    ranks = [f"rank {rank}" for rank in range(len(time_per_rank_s))]
    shares = list(dict.fromkeys(share for times in time_per_rank_s for share in times))
    others = iter(OTHER_COLOURS * len(shares))
    figure = _figure(height=110 + (34 if len(ranks) <= 16 else 16) * len(ranks), right=8)
    for share in shares:
        figure.add_bar(
            y=ranks,
            x=[1e3 * times.get(share, 0.0) for times in time_per_rank_s],
            name=escape(share),
            orientation="h",
            marker={
                "color": SHARE_COLOURS.get(share) or next(others),
                "line": {"color": "white", "width": 1},
            },
            texttemplate="%{x:.1f}",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "white"},
            hovertemplate="%{x:.2f} ms",
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.28,
        hovermode="y unified",
        uniformtext={"mode": "hide", "minsize": 11},
        showlegend=True,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    figure.update_xaxes(showgrid=True, gridcolor=RULE, ticksuffix=" ms", showline=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _html(figure, "time")


def _figure(height: int, right: int) -> Any:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": right, "t": 14, "b": 40},
        font={"family": FONT, "size": 13, "color": MUTED},
        paper_bgcolor="white",
        plot_bgcolor="white",
        showlegend=False,
        hovermode="x unified",
        hoverlabel={"bgcolor": "white", "bordercolor": RULE, "font": {"color": INK}},
    )
    figure.update_xaxes(showgrid=False, zeroline=False, linecolor=RULE, ticks="outside", tickcolor=RULE)
    figure.update_yaxes(gridcolor=RULE, zeroline=False, ticksuffix=" ", exponentformat="e")
    return figure


def _html(figure: Any, div_id: str) -> str:
    config = {"displayModeBar": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id=div_id, config=config))


def _mode(y: NDArray[np.float64]) -> str:
    return "lines" if len(y) > 2 else "lines+markers"


def _running_mean(y: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean of about ``width`` values around each; towards the ends of fewer, so that it lags nowhere."""
    sums = np.cumsum(np.concatenate([[0.0], y]))
    place = np.arange(len(y))
    reach = np.minimum(np.minimum(place, place[::-1]), width // 2)
    mean: NDArray[np.float64] = (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)
    return mean


def _apart(lines: list[tuple[float, str, str]], y: NDArray[np.float64]) -> bool:
    """Whether the labels of two horizontal lines fit beside each other on the axis that ``y`` spans."""
    values = [value for value, _, _ in lines]
    shown = np.array([*values, *y[np.isfinite(y)]])
    return len(lines) < 2 or bool(np.ptp(values) > 0.08 * np.ptp(shown))
