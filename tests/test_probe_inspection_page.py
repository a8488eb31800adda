"""The page about a probe pool: complete, harmless, legible."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from test_probe_inspection import base, controlled, pool, probe

from probes.inspection import FEW, inspect
from probes.inspection_page import inspection_page
from probes.inspection_text import sections

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Tags of a page, each with its attributes; fails on tags that don't pair up."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def full_pool(folder: Path) -> Path:
    """A pool that fills every part of the page."""
    bases = [
        base(f"q{i}", workload=name, rollout=rollout, score=0.5)
        for name in ("one", "two")
        for i in range(FEW)
        for rollout in (0, 100)
    ]
    probes = [
        probe(of, arm, delta, is_gap=arm == "edge")
        for i, of in enumerate(bases)
        for arm, delta in (("edge", -0.5 if i % 3 else 0.25), ("resample", 0.0), ("placebo", 0.1))
    ]
    probes += [
        probe(bases[0], delta=0.5, ends=("b", "c"), kind="distant_ancestor"),
        probe(bases[1], ends=("a", "c")),
    ]
    return pool(folder, bases, probes)


def page_of(folder: Path) -> str:
    return inspection_page(inspect(folder))


def test_the_page_says_all_that_the_text_says(tmp_path: Path) -> None:
    folder = full_pool(tmp_path)
    text = Page(page_of(folder)).text
    shown = sections(inspect(folder))
    assert {"noise", "arms", "kinds", "edges", "foresight", "rollouts", "paper"} <= {
        section.key for section in shown
    }
    for section in shown:
        wanted = [section.title, *section.after, *(cell for row in section.table for cell in row)]
        for words in wanted:
            assert " ".join(words.split()) in text


def test_the_page_has_no_script_and_loads_nothing(tmp_path: Path) -> None:
    source = page_of(full_pool(tmp_path))
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a in ("src", "href") or a[:2] == "on"]
    assert "url(" not in source
    assert "@import" not in source
    policy = [attrs.get("content") or "" for tag, attrs in page.tags if tag == "meta"]
    assert any("default-src 'none'" in content for content in policy)


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\"' onload=x \x1b[31m\u202e{{ 7 * 7 }}"
    bases = [base(f"q{i}", workload=bad) for i in range(FEW)]
    probes = [
        probe(of, arm, 0.5, ends=(f"s{bad}", f"t{bad}"))
        for of in bases
        for arm in ("edge", "placebo")
    ]
    source = page_of(pool(tmp_path, bases, probes, workload=bad, about=bad))
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert "\x1b" not in source
    assert "\u202e" not in source
    assert "{{ 7 * 7 }}" in page.text
    assert html.escape("<script>alert(1)</script>") in source


@pytest.mark.parametrize(("placebo", "verdict"), [(0.1, "yes"), (0.6, "no")])
def test_the_answer_about_noise_stands_out(tmp_path: Path, placebo: float, verdict: str) -> None:
    folder = controlled(tmp_path, 60, edge=0.6, resample=0.1, placebo=placebo)
    source = page_of(folder)
    assert source.count(f'<div class="answer {verdict}">') == 2
    assert source.count(f"<b>{verdict.upper()}</b>") == 2
    assert source.index("<b>") < source.index("<h2>")


def test_an_interval_is_drawn_on_its_side_of_zero(tmp_path: Path) -> None:
    source = page_of(controlled(tmp_path, 60, edge=0.6, resample=0.1, placebo=0.6))
    ranges = re.findall(r'track( \w+)?">.*?range" style="left: ([\d.]+)%; width: ([\d.]+)%', source)
    found = [
        (tone.strip(), float(left), float(left) + float(width)) for tone, left, width in ranges
    ]
    assert [tone for tone, _, _ in found] == ["more", "", "more", ""]
    for tone, left, right in found:
        assert (left > 50) == (tone == "more")
        assert right > 50


def test_cells_of_few_probes_are_faint_and_those_never_tried_are_blank(tmp_path: Path) -> None:
    bases = [base(f"q{i}") for i in range(FEW)]
    probes = [probe(of, delta=0.5) for of in bases]
    probes += [probe(bases[0], delta=-0.5, ends=("b", "c"))]
    source = page_of(pool(tmp_path, bases, probes))
    first, _ = re.findall(r'<table class="grid">.*?</table>', source, re.DOTALL)
    cells = re.findall(r"<td( class=\"\w+\")?( style=\"[^\"]*\")?>(.*?)</td>", first)
    assert [(kind, text) for kind, _, text in cells] == [
        ("", f"100.0%<small>n={FEW}</small>"),
        (' class="blank"', ""),
        (' class="blank"', ""),
        (' class="faint"', "100.0%<small>n=1</small>"),
    ]
    full, faint = (float(re.findall(r"/ ([\d.]+)\)", cells[i][1])[0]) for i in (0, 3))
    assert faint < full / 2


def test_gain_and_loss_have_colours_of_their_own(tmp_path: Path) -> None:
    bases = [base(f"q{i}", score=0.5) for i in range(FEW)]
    probes = [probe(of, delta=0.5) for of in bases]
    probes += [probe(of, delta=-0.5, ends=("b", "c")) for of in bases]
    source = page_of(pool(tmp_path, bases, probes))
    assert re.search(r"rgb\(var\(--more\) / 0.55\)\">\+0.500", source)
    assert re.search(r"rgb\(var\(--less\) / 0.55\)\">-0.500", source)


def test_small_changes_look_small(tmp_path: Path) -> None:
    bases = [base(f"q{i}") for i in range(FEW)]
    probes = [probe(of, delta=0.005) for of in bases]
    source = page_of(pool(tmp_path, bases, probes))
    (opacity,) = re.findall(r"rgb\(var\(--more\) / ([\d.]+)\)\">\+0.005", source)
    assert 0.06 < float(opacity) < 0.15


def test_an_edge_with_nothing_to_deliver_has_no_number(tmp_path: Path) -> None:
    one = base("q1")
    source = page_of(pool(tmp_path, [one], [probe(one)]))
    assert ">-<small>n=0</small>" in source


def test_an_empty_pool_has_a_page(tmp_path: Path) -> None:
    page = Page(page_of(pool(tmp_path)))
    assert "No base run yet." in page.text
    assert "UNKNOWN" in page.text


def test_texts_are_legible_on_every_colour_in_both_themes() -> None:
    source = files("probes").joinpath("templates/inspection.html.j2").read_text("utf-8")
    themes = re.findall(
        r"--page: (#\w+); --text: (#\w+); --quiet: (#\w+);.*?--panel: (#\w+);\s*"
        r"--more: ([\d ]+); --less: ([\d ]+);",
        source,
    )
    assert len(themes) == 2
    for page, text, quiet, panel, *tones in themes:
        for ground in (page, panel):
            assert contrast(hex_rgb(text), hex_rgb(ground)) >= 7.0
            assert contrast(hex_rgb(quiet), hex_rgb(ground)) >= 4.5
        for tone in tones:
            rgb = tuple(map(float, tone.split()))
            assert contrast(hex_rgb(text), mixed(rgb, hex_rgb(page), 0.55)) >= 4.5
            assert contrast(hex_rgb(quiet), mixed(rgb, hex_rgb(page), 0.15)) >= 4.5


def hex_rgb(colour: str) -> tuple[float, ...]:
    return tuple(float(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def mixed(over: tuple[float, ...], under: tuple[float, ...], opacity: float) -> tuple[float, ...]:
    return tuple(opacity * a + (1 - opacity) * b for a, b in zip(over, under, strict=True))


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Contrast ratio of WCAG 2."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(rgb: tuple[float, ...]) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
