"""What the documentation shows is run, and what it points to exists."""

import importlib
import json
import re
from pathlib import Path

import pytest
from loopback import LoopbackServer, Reply
from typer.testing import CliRunner

import splice
from splice.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "skeletons").glob("*/README.md"),
    ]
)


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def trip_desk(request: dict[str, object]) -> Reply:
    """Replies as a careful reader of the README's documents would give them."""
    messages = request["messages"]
    assert isinstance(messages, list)
    system, user = messages[0]["content"], messages[-1]["content"]
    if "routes" in system:
        return Reply("Doha")
    if "rules" in system:
        return Reply("31 hours" if "additional evidence" in user else "not found")
    return Reply("31 hours" if "31 hours" in user else "I don't know.")


def test_the_example_of_the_readme_runs_and_repairs_its_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    with LoopbackServer(trip_desk) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "routing -> visa" in printed
    assert re.search(r'^Answer +"31 hours"$', printed, re.M)


def test_the_example_of_the_readme_stays_short() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12


def test_the_workflow_file_of_the_docs_loads(tmp_path: Path) -> None:
    (toml,) = blocks(ROOT / "docs" / "workflows.md", "toml")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "routes.txt").write_text("Lisbon to Nairobi: Doha.", "utf-8")
    (tmp_path / "workflow.toml").write_text(toml, "utf-8")
    loaded = splice.load_workflow(
        tmp_path / "workflow.toml", functions={"check_hours": lambda given: "31"}
    )
    assert loaded.plan.order == ("routing", "visa", "check", "desk")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    named = {line.split()[1] for line in text.splitlines() if line.startswith("splice ")}
    listed = CliRunner().invoke(app, ["--help"]).output
    assert named
    assert [name for name in named if name not in listed] == []


def test_every_make_target_of_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text("utf-8"), re.M)
    }
    assert named
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.M)] == []


def test_the_example_on_real_questions_reads_their_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    multihop = importlib.import_module("multihop")
    pages = [
        {"title": "Dream", "sentences": ["Dream is sung by Ann Lee."], "is_supporting": True},
        {"title": "Ann Lee", "sentences": ["Ann Lee was born in Oslo."], "is_supporting": True},
        {"title": "Oslo", "sentences": ["Oslo is a city."], "is_supporting": False},
    ]
    row = {
        "id": "q",
        "question": "Where was the performer of song Dream born?",
        "answer": "Oslo",
        "answer_aliases": [],
        "type": "compositional",
        "paragraphs": pages,
        "supporting_facts": [["Dream", 0], ["Ann Lee", 0]],
    }
    (tmp_path / "val.jsonl").write_text(json.dumps(row), "utf-8")
    [case] = multihop.cases(tmp_path / "val.jsonl")
    multihop.workflow().check_query(case.query)
    assert case.query.subtasks == {
        "first": "Who is the performer of Dream?",
        "second": "Where was this person born?",
    }
    assert "Dream" in {document.title for document in case.query.context["first"]}
    assert "Ann Lee" in {document.title for document in case.query.context["second"]}


def test_every_test_that_the_overview_names_exists() -> None:
    overview = (ROOT / "tests" / "README.md").read_text("utf-8")
    named = set(re.findall(r"::(test_\w+)`", overview))
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in source] == []
