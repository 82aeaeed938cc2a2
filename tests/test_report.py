"""The report shows the run, needs no network, and runs nothing that the run wrote."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from brigata.describe import JobError
from brigata.train.figures import time_figure
from brigata.train.report import write_report

ATTACK = "</pre></script><script>alert('x')</script><img src=x onerror=alert(1)>&amp;"


def run_folder(folder: Path, steps: int = 100, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    metrics = [
        {
            "step": step,
            "loss": 5.5 - 0.03 * step,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 4096,
            "step_time_s": 0.2,
            "tokens_per_s": 20_480.0,
            "exposed_comm_s": 0.01,
            "peak_memory_bytes": 2**28,
        }
        for step in range(steps)
    ]
    summary = {
        "final_loss": 2.53,
        "held_out_loss": 2.641,
        "trigram_loss": 1.752,
        "median_step_time_s": 0.2,
        "tokens_per_s": 20_480.0,
        "layout": {"tp": 2, "dp": 1, "overlap": "direct", "keep_gathered": False},
        "world_size": 2,
        "overlapped_calls": 19_200,
        "parameters": 3_412_224,
        "name": "small-job",
        "sample": "def f(x):\n    return x",
        "corpus": "the standard library: 600 files, 11.8 MB",
        "time_per_rank_s": [{"compute": 0.17, "exposed tensor-parallel": 0.01, "optimizer": 0.02}] * 2,
        **changes,
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in metrics))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.text += data


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_report_shows_the_run(tmp_path: Path) -> None:
    path = write_report(run_folder(tmp_path))
    assert path == tmp_path / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    shown = [
        "small-job",
        "2.641",
        "2.530",
        "20.5 k",
        "200.0",
        "5.0",
        "19,200",
        "3,412,224",
        "256",
        "600 files",
    ]
    shown += ["0.89 above a trigram table", "return x", "keep_gathered", "direct", "on 2 ranks"]
    for text in shown:
        assert text in page.text, text
    figures = {attrs.get("id") for tag, attrs in page.tags if tag == "div"}
    assert {"loss", "time", "grad-norm", "lr"} <= figures


def test_report_needs_no_network(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path))
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object"), tag
        assert not attrs.keys() & {"src", "href"}, (tag, attrs)
    policies = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policies
    assert "default-src 'none'" in str(policies[0])


@pytest.mark.parametrize("field", ["sample", "corpus", "name", "layout key", "layout value", "share"])
def test_strings_of_the_run_are_text_and_no_markup(field: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "layout key": {"layout": {ATTACK: 1}},
        "layout value": {"layout": {"tp": ATTACK}},
        "share": {"time_per_rank_s": [{ATTACK: 1.0}]},
    }
    plain = page_of(run_folder(tmp_path / "plain"))
    page = page_of(run_folder(tmp_path / "attack", **changes.get(field, {field: ATTACK})))
    assert sum(tag == "script" for tag, _ in page.tags) == sum(tag == "script" for tag, _ in plain.tags)
    assert not any("onerror" in attrs for _, attrs in page.tags)
    if field != "share":
        assert ATTACK in page.text


def test_names_in_a_figure_are_escaped_for_plotly_too() -> None:
    """Plotly renders a subset of HTML in names: what the run wrote must not become a link or a tag."""
    html = time_figure([{"<a href='x'>compute</a>": 1.0}])
    assert "&lt;a" in html.replace(r"\u0026", "&")
    assert "<a " not in html
    assert r"\u003ca" not in html


@pytest.mark.parametrize("steps", [1, 2, 100])
@pytest.mark.parametrize("missing", [{}, {"held_out_loss": None, "trigram_loss": None, "sample": ""}])
def test_short_runs_and_runs_without_scores_are_reported(
    steps: int, missing: dict[str, Any], tmp_path: Path
) -> None:
    page = page_of(run_folder(tmp_path, steps, **missing))
    assert ("not scored" in page.text) == bool(missing)
    assert ("no sample" in page.text) == bool(missing)


def test_loss_figure_carries_both_reference_lines(tmp_path: Path) -> None:
    html = write_report(run_folder(tmp_path)).read_text(encoding="utf-8")
    assert re.search(r"1\.752[^\"]*trigram table", html)
    assert re.search(r"2\.641[^\"]*held-out", html)


def test_folder_of_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"run folder .* cannot be read: No such file.*finished run"):
        write_report(tmp_path)
    folder = run_folder(tmp_path / "run", steps=0)
    with pytest.raises(JobError, match="holds no step"):
        write_report(folder)
    (folder / "summary.json").write_text("{")
    with pytest.raises(JobError, match="is damaged"):
        write_report(folder)
