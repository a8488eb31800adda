"""The command line: data on stdout, notes on stderr, one line for what went wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from loopback import LoopbackServer, Reply
from typer.testing import CliRunner

from splice import cli
from splice._version import __version__
from splice.records import RepairBatch, RepairResult, Trace

QUESTION = "I fly from Lisbon. How many hours may I stay at the stop?"

WORKFLOW = """\
name = "trip"
output = "desk"
edges = [["routes", "desk"], ["visas", "desk"]]

[[nodes]]
id = "routes"
role = "You look up routes."
subtask = "Where is the stop?"
abstention_phrase = "not found"
documents = [{ text = "The stop from Lisbon is Doha." }]

[[nodes]]
id = "visas"
role = "You look up visas."
subtask = "How many hours at the stop?"
abstention_phrase = "not found"
documents = [{ text = "Doha: 31 hours. Madrid: 9 hours." }]

[[nodes]]
id = "desk"
role = "You answer."
"""

FUNCTIONS = """\
name = "plain"
output = "last"
edges = [["first", "last"]]

[[nodes]]
id = "first"
kind = "function"
call = "ask"

[[nodes]]
id = "last"
kind = "function"
call = "answer"
"""

CODE = """\
from __future__ import annotations

from dataclasses import dataclass

from splice import tool


@dataclass
class Kept:
    text: str


def ask(given):
    return Kept(given.query.text.upper()).text


async def answer(given):
    return given.parents["first"] + "!"


@tool(effects="none")
def look_up(city: str) -> str:
    "Look a city up."
    return f"{city}: 31 hours"
"""


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


Splice = Callable[..., Done]


@pytest.fixture
def splice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Splice:
    """The command, run in this process through its real door."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["splice", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return Done(int(code), out, err)

    return run


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.toml"
    path.write_text(WORKFLOW, "utf-8")
    return path


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Path]:
    """A workflow of functions alone, and the file with their code."""
    path, code = tmp_path / "plain.toml", tmp_path / "my_code.py"
    path.write_text(FUNCTIONS, "utf-8")
    code.write_text(CODE, "utf-8")
    return path, code


def colleagues(request: dict[str, Any]) -> Reply:
    system, user = (message["content"] for message in request["messages"])
    if "routes" in system:
        return Reply(text="Doha")
    if "visas" in system:
        return Reply(text="31 hours" if "additional evidence" in user else "not found")
    return Reply(text="31 hours" if "31" in user else "unknown")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    """The colleagues behind the endpoint of the environment."""
    with LoopbackServer(colleagues) as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        yield running


def queries(folder: Path, *lines: object) -> Path:
    path = folder / "queries.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


# --- init, schema, version -------------------------------------------------------------------


def test_init_writes_a_sample_that_is_valid(splice: Splice, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "new"
    made = splice("init", folder)
    assert made.code == 0
    assert str(folder / "workflow.toml") in made.out
    assert "next: splice validate" in made.err
    assert splice("validate", folder / "workflow.toml").code == 0
    from splice.queries import load_cases

    assert all(case.answers for case in load_cases(folder / "queries.jsonl"))


def test_init_takes_an_empty_folder_and_touches_no_other(splice: Splice, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    assert splice("init", folder).code == 0
    before = sorted(path.name for path in folder.iterdir())
    again = splice("init", folder)
    assert again.code == 1
    assert again.error == f"{folder} is not an empty folder; nothing was written"
    assert sorted(path.name for path in folder.iterdir()) == before


def test_init_over_a_file_is_refused(splice: Splice, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    assert "is not an empty folder" in splice("init", tmp_path / "file").error
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_schema_is_a_json_schema_that_names_the_keys_of_a_workflow(splice: Splice) -> None:
    schema = json.loads(splice("schema").out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert {"name", "nodes", "edges", "output"} <= set(schema["properties"])


def test_version_is_printed() -> None:
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"splice {__version__}\n")


def test_help_names_every_command() -> None:
    done = CliRunner().invoke(cli.app, ["--help"])
    assert done.exit_code == 0
    for command in ("init", "validate", "schema", "run", "repair", "diagnose", "trace", "models"):
        assert command in done.stdout


def test_a_command_that_can_not_be_imported_takes_no_other_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = EntryPoint(name="broken", value="no_such_package:app", group="splice.commands")
    cli.add_commands([broken])
    assert "no command 'broken': No module named 'no_such_package'" in capsys.readouterr().err
    assert CliRunner().invoke(cli.app, ["--version"]).exit_code == 0


# --- validate --------------------------------------------------------------------------------


def test_a_valid_workflow_is_shown(splice: Splice, workflow: Path) -> None:
    done = splice("validate", workflow)
    assert (done.code, done.err) == (0, "")
    assert "reads routes, visas; gives the answer" in done.out
    assert "trip: valid; 1 missing edge could be tried" in done.out


def test_names_from_a_file_of_anybodys_drive_no_terminal(splice: Splice, workflow: Path) -> None:
    escape = r"\u001b[2J"
    workflow.write_text(WORKFLOW.replace('name = "trip"', f'name = "trip{escape}"'), "utf-8")
    done = splice("validate", workflow)
    assert (done.code, "\x1b" in done.out) == (0, False)
    workflow.write_text(WORKFLOW.replace('id = "visas"', f'id = "{escape}"'), "utf-8")
    done = splice("validate", workflow)
    assert (done.code, "\x1b" in done.err) == (1, False)
    path = queries(workflow.parent, {"text": " ", "id": "\x1b[2J"})
    workflow.write_text(WORKFLOW, "utf-8")
    assert "\x1b" not in splice("run", workflow, "--queries", path).err


def test_a_valid_workflow_as_json(splice: Splice, workflow: Path) -> None:
    done = splice("validate", workflow, "--json")
    found = json.loads(done.out)
    assert found["nodes"] == ["routes", "visas", "desk"]
    assert found["candidate_edges"] == [["routes", "visas", "parallel_branch"]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name = ", "name = = ", "not TOML"),
        ('name = "trip"', "", "key 'name' is missing"),
        ('name = "trip"', 'name = "trip"\ncolour = 1', "unknown key 'colour'"),
        ('id = "visas"', 'id = "routes"', "there is a node 'routes' already"),
        ('id = "visas"', 'id = "7"', "'7' is not a letter followed by"),
        ('output = "desk"', 'output = "disk"', "output names unknown node 'disk'"),
        ('["visas", "desk"]', '["visa", "desk"]', "unknown node 'visa'; there are routes"),
        ('["visas", "desk"]', '["desk", "routes"]', "cycle: "),
        ('["visas", "desk"]', '["desk", "desk"]', "can't read its own output"),
        (', ["visas", "desk"]', "", "no path leads from 'visas'"),
        ('role = "You answer."', 'role = "."\ntools = ["x"]', "names missing tool 'x'"),
        ('role = "You answer."', 'role = "."\nkind = "robot"', "kind 'robot'"),
        ('text = "The', 'file = "../outside.txt"\n#', "not TOML"),
        (
            '{ text = "The stop from Lisbon is Doha." }',
            '{ file = "../outside.txt" }',
            "lies outside",
        ),
        (
            '{ text = "The stop from Lisbon is Doha." }',
            '{ file = "none.txt" }',
            "'none.txt': No such file",
        ),
    ],
)
def test_what_is_wrong_with_a_workflow_is_said_in_one_line_with_its_place(
    splice: Splice, workflow: Path, old: str, new: str, message: str
) -> None:
    assert old in WORKFLOW
    workflow.write_text(WORKFLOW.replace(old, new), "utf-8")
    done = splice("validate", workflow)
    assert (done.code, done.out) == (1, "")
    assert message in done.error
    assert done.error.startswith(str(workflow))


def test_a_workflow_that_is_not_there_or_no_text_is_named(splice: Splice, tmp_path: Path) -> None:
    assert splice("validate", tmp_path / "no.toml").error.endswith(
        "no.toml: No such file or directory"
    )
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    assert "binary.toml: not UTF-8 (byte 8)" in splice("validate", tmp_path / "binary.toml").error


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["mend"],
        ["run", "w.toml", "--colour"],
        ["repair", "w.toml", "-q", "x", "--budget", "1.5"],
        ["repair", "w.toml", "-q", "x", "--writer", "nobody"],
        ["repair", "w.toml", "-q", "x", "--weighting", "heavy"],
        ["run", "w.toml", "-q", "x", "--threads", "0"],
    ],
)
def test_wrong_usage_ends_with_2_and_says_how_to_get_help(
    splice: Splice, arguments: list[str]
) -> None:
    done = splice(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Usage: splice" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["run", "repair"])
def test_either_a_question_or_a_file_of_questions_is_wanted(
    splice: Splice, workflow: Path, command: str
) -> None:
    for given in ([], ["-q", "x", "--queries", "y.jsonl"]):
        done = splice(command, workflow, *given)
        assert done.code == 2
        assert "give either --query or --queries" in done.err


# --- run and repair --------------------------------------------------------------------------


@pytest.mark.usefixtures("server")
def test_run_shows_each_node_and_the_answer(splice: Splice, workflow: Path) -> None:
    done = splice("run", workflow, "-q", QUESTION)
    assert (done.code, done.err) == (0, "")
    assert "2. visas: abstained" in done.out
    assert '"unknown"' in done.out


@pytest.mark.usefixtures("server")
def test_run_as_json_is_one_trace_a_line(splice: Splice, workflow: Path, tmp_path: Path) -> None:
    path = queries(tmp_path, {"text": QUESTION}, {"text": "And from Porto?", "id": "porto"})
    done = splice("run", workflow, "--queries", path, "--json")
    traces = [Trace.model_validate_json(line) for line in done.out.splitlines()]
    assert [trace.query.id for trace in traces] == ["q1", "porto"]
    assert done.err.splitlines() == ["1/2 q1", "2/2 porto"]


@pytest.mark.usefixtures("server")
def test_repair_shows_the_page_of_a_result(splice: Splice, workflow: Path) -> None:
    done = splice("repair", workflow, "-q", QUESTION)
    assert (done.code, done.err) == (0, "")
    assert "routes -> visas" in done.out
    assert "ADOPT" in done.out


def test_repair_as_json_is_one_result(
    splice: Splice, workflow: Path, server: LoopbackServer
) -> None:
    done = splice("repair", workflow, "-q", QUESTION, "--json")
    result = RepairResult.model_validate_json(done.out)
    assert result.answer == "31 hours"
    assert len(result.calls) == server.n_requests == 5
    assert {request["model"] for request in server.requests} == {"loopback"}


@pytest.mark.usefixtures("server")
def test_a_retained_answer_is_no_failure(splice: Splice, workflow: Path) -> None:
    done = splice("repair", workflow, "-q", QUESTION, "--weighting", "none", "--json")
    assert done.code == 0
    done = splice("repair", workflow, "-q", "Is it 31?", "--json")
    assert done.code == 0
    assert RepairResult.model_validate_json(done.out).decision.action == "retain"


@pytest.mark.usefixtures("server")
def test_a_report_is_written_as_a_page(splice: Splice, workflow: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = splice("repair", workflow, "-q", QUESTION, "--report", page)
    assert done.code == 0
    assert done.err == f"wrote {page}\n"
    assert page.read_text("utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_report_that_can_not_be_written_is_refused_before_the_first_call(
    splice: Splice, workflow: Path, tmp_path: Path, server: LoopbackServer
) -> None:
    for path in (tmp_path, tmp_path / "no" / "report.html"):
        done = splice("repair", workflow, "-q", QUESTION, "--report", path)
        assert done.code == 2
        assert "--report names no file in a folder that exists" in " ".join(done.err.split())
    assert server.n_requests == 0


def test_a_report_of_many_questions_is_refused_before_the_first_call(
    splice: Splice, workflow: Path, server: LoopbackServer, tmp_path: Path
) -> None:
    path = queries(tmp_path, {"text": QUESTION})
    done = splice("repair", workflow, "--queries", path, "--report", tmp_path / "r.html")
    assert (done.code, server.n_requests) == (2, 0)
    assert "--report shows one question" in done.err


@pytest.mark.usefixtures("server")
def test_a_batch_shows_a_table_and_totals(splice: Splice, workflow: Path, tmp_path: Path) -> None:
    path = queries(
        tmp_path,
        {"text": QUESTION, "id": "lisbon", "answers": ["31 hours", "31"]},
        {"text": "Is it 31?", "id": "known", "answers": ["31"]},
    )
    done = splice("repair", workflow, "--queries", path)
    assert done.code == 0
    assert "candidate" in done.out.splitlines()[1]
    assert "1 fixed, 0 broken" in done.out
    done = splice("repair", workflow, "--queries", path, "--json", "--budget", "0.5")
    batch = RepairBatch.model_validate_json(done.out)
    assert [result.query.id for result in batch.results] == ["lisbon", "known"]
    assert (batch.n_trials, batch.budget_fraction) == (1, 0.5)


@pytest.mark.usefixtures("server")
def test_a_batch_without_answers_is_not_scored(
    splice: Splice, workflow: Path, tmp_path: Path
) -> None:
    done = splice("repair", workflow, "--queries", queries(tmp_path, {"text": QUESTION}))
    assert done.code == 0
    assert "unknown: no references were given" in done.out


@pytest.mark.parametrize("flag", [["--json"], []])
def test_no_escape_codes_in_what_is_no_terminal(
    splice: Splice,
    workflow: Path,
    tmp_path: Path,
    server: LoopbackServer,
    monkeypatch: pytest.MonkeyPatch,
    flag: list[str],
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    path = queries(tmp_path, {"text": QUESTION, "answers": ["31"]})
    for arguments in (
        ["repair", workflow, "--queries", path],
        ["repair", workflow, "-q", QUESTION],
        ["validate", workflow],
        ["run", workflow, "-q", QUESTION],
    ):
        done = splice(*arguments, *flag)
        assert "\x1b" not in done.out + done.err


def test_an_endpoint_that_fails_is_told_with_exit_code_1(
    splice: Splice, workflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackServer(lambda request: Reply(status=400, error="out of order")) as broken:
        monkeypatch.setenv("OPENAI_BASE_URL", broken.base_url)
        for command in ("run", "repair"):
            done = splice(command, workflow, "-q", QUESTION, "--model", "m")
            assert done.code == 1
            assert "query 'query': node 'desk' skipped: nothing arrived" in done.error
            assert "out of order" in done.out


def test_a_question_that_does_not_fit_is_refused_before_the_first_call(
    splice: Splice, workflow: Path, server: LoopbackServer, tmp_path: Path
) -> None:
    assert splice("run", workflow, "-q", " ").error == "query 'query' is empty"
    path = queries(tmp_path, {"text": "a"}, {"text": "b", "context": {"nobody": ["x"]}})
    assert "unknown node 'nobody'" in splice("repair", workflow, "--queries", path).error
    assert server.n_requests == 0


# --- questions as a file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ("[]", "not a JSON object"),
        ('{"id": "x"}', "key 'text' is missing"),
        ('{"text": "x", "reference": "y"}', "unknown key 'reference'; there are id, text, context"),
        ('{"text": 7}', "text: Input should be a valid string"),
        ('{"text": "x", "answers": "y"}', "answers: Input should be a valid tuple"),
        ("[" * 100_000, "not JSON: "),
        ('{"text": ' + "9" * 10_000 + "}", "not JSON: "),
    ],
)
def test_a_bad_line_of_the_questions_is_named_by_its_number(
    splice: Splice, workflow: Path, tmp_path: Path, line: str, message: str
) -> None:
    path = queries(tmp_path, {"text": "fine"}, "", line)
    done = splice("run", workflow, "--queries", path)
    assert done.code == 1
    assert done.error.startswith(f"{path}:3: {message}")


def test_questions_that_are_no_text_are_named_by_the_byte(
    splice: Splice, workflow: Path, tmp_path: Path
) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    assert splice("run", workflow, "--queries", path).error == f"{path}: not UTF-8 (byte 13)"


def test_a_file_without_questions_is_refused(
    splice: Splice, workflow: Path, tmp_path: Path
) -> None:
    path = queries(tmp_path, "", " ")
    assert splice("run", workflow, "--queries", path).error == f"{path}: no queries"
    gone = tmp_path / "gone.jsonl"
    assert "No such file" in splice("run", workflow, "--queries", gone).error


@pytest.mark.usefixtures("server")
def test_a_line_separator_inside_a_question_does_not_end_the_line(
    splice: Splice, workflow: Path, tmp_path: Path
) -> None:
    path = queries(tmp_path, '{"text": "two\u2028lines\x85here"}')
    done = splice("run", workflow, "--queries", path, "--json")
    assert Trace.model_validate_json(done.out.strip()).query.text == "two\u2028lines\x85here"


@pytest.mark.usefixtures("server")
def test_two_questions_of_one_id_are_refused(
    splice: Splice, workflow: Path, tmp_path: Path
) -> None:
    path = queries(tmp_path, {"text": "a", "id": "x"}, {"text": "b", "id": "x"})
    assert "two queries with the id 'x'" in splice("repair", workflow, "--queries", path).error


# --- code ------------------------------------------------------------------------------------


def test_functions_come_from_the_file_that_the_user_names(
    splice: Splice, plain: tuple[Path, Path]
) -> None:
    path, code = plain
    assert splice("validate", path, "--code", code).code == 0
    done = splice("run", path, "-q", "hello", "--code", code, "--json")
    assert Trace.model_validate_json(done.out.strip()).answer == "HELLO!"
    done = splice("repair", path, "-q", "hello", "--code", code, "--json")
    assert RepairResult.model_validate_json(done.out.strip()).answer == "HELLO!"
    assert "missing function 'ask'; none was handed in" in splice("validate", path).error


def test_tools_come_from_the_file_that_the_user_names(
    splice: Splice,
    workflow: Path,
    plain: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workflow.write_text(
        WORKFLOW.replace('role = "You answer."', 'role = "You answer."\ntools = ["look_up"]'),
        "utf-8",
    )

    def respond(request: dict[str, Any]) -> Reply:
        if "tools" in request and request["messages"][-1]["role"] != "tool":
            return Reply(text=None, tool_calls=(("look_up", '{"city": "Doha"}'),))
        if "tools" in request:
            return Reply(text=request["messages"][-1]["content"])
        return Reply(text="Doha")

    with LoopbackServer(respond) as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        done = splice("run", workflow, "-q", QUESTION, "--code", plain[1], "--json")
    assert Trace.model_validate_json(done.out.strip()).answer == "Doha: 31 hours"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("code.py", "1 / 0", "ZeroDivisionError: division by zero"),
        ("code.py", "def", "SyntaxError: invalid syntax"),
        ("code.py", "import nowhere_to_be_found", "ModuleNotFoundError"),
        ("code.txt", "x = 1", "not a Python file"),
        (".", "", "no such file"),
    ],
)
def test_code_that_can_not_be_loaded_is_told_in_one_line(
    splice: Splice, plain: tuple[Path, Path], tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    if name != ".":
        path.write_text(text, "utf-8")
    done = splice("validate", plain[0], "--code", path)
    assert done.code == 1
    assert message in done.error


def test_a_code_file_hides_no_module_of_the_same_name(
    splice: Splice, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    code = tmp_path / "json.py"
    code.write_text(CODE, "utf-8")
    done = splice("run", plain[0], "-q", "hello", "--code", code, "--json")
    assert json.loads(done.out)["answer"] == "HELLO!"
    assert sys.modules["json"] is json


# --- which model -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "repair"])
def test_without_endpoint_and_extra_both_ways_out_are_named(
    splice: Splice, workflow: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    done = splice(command, workflow, "-q", QUESTION)
    assert done.code == 1
    assert "OPENAI_API_KEY" in done.error
    assert "OPENAI_BASE_URL" in done.error
    assert "pip install 'splice-repair[local]'" in done.error


class Listing:
    """A server that serves these models, and never answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int = 200) -> None:
        import http.server
        import threading

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        monkeypatch.setenv(
            "OPENAI_BASE_URL", f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        )

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def listing(*names: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (listing("small", "big"), 200, "serves 'small', 'big'; name one with --model"),
        (listing(), 200, "serves none; name one with --model"),
        (b"nobody here", 404, "does not say which models it serves"),
        (b"<html>", 200, "does not say which models it serves"),
        (b"[1]", 200, "does not say which models it serves"),
        (b'{"data": [{}]}', 200, "does not say which models it serves"),
    ],
    ids=["several", "none", "no such path", "no JSON", "a list", "no id"],
)
def test_a_server_that_does_not_offer_exactly_one_model_is_named(
    splice: Splice,
    workflow: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: bytes,
    status: int,
    message: str,
) -> None:
    with Listing(monkeypatch, body, status):
        done = splice("run", workflow, "-q", QUESTION)
    assert done.code == 1
    assert done.error.startswith("http://127.0.0.1")
    assert message in done.error


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://me:s3cret@127.0.0.1:9/v1?token=s3cret", "k", "http://127.0.0.1:9/v1 does not say"),
        ("127.0.0.1:9", "k", "must begin with http:// or https://"),
        ("http://127.0.0.1:9/v1", "s3cret\nkey", "the API key holds characters"),
    ],
)
def test_a_complaint_about_the_endpoint_shows_no_secret(
    splice: Splice,
    workflow: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    key: str,
    message: str,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    done = splice("run", workflow, "-q", QUESTION)
    assert done.code == 1
    assert message in done.error
    assert "s3cret" not in done.err


def test_a_model_named_on_the_command_line_or_by_each_agent_is_not_asked_for(
    splice: Splice, workflow: Path, server: LoopbackServer
) -> None:
    done = splice("run", workflow, "-q", QUESTION, "--model", "big", "--json")
    assert done.code == 0
    assert {request["model"] for request in server.requests} == {"big"}
    workflow.write_text(WORKFLOW.replace("[[nodes]]", '[model]\nname = "house"\n\n[[nodes]]', 1))
    done = splice("run", workflow, "-q", QUESTION, "--json")
    assert {request["model"] for request in server.requests[3:]} == {"house"}


def test_with_a_key_alone_the_model_of_the_paper_is_asked(
    workflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splice.models.default import default_model
    from splice.workflow import load_workflow

    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert default_model(load_workflow(workflow)).identity(None).name == "gpt-4o-mini"


# --- recorded runs ---------------------------------------------------------------------------


@pytest.fixture
def store(splice: Splice, workflow: Path, tmp_path: Path, server: LoopbackServer) -> Path:
    """A store with one run and one repair."""
    path = tmp_path / "store.jsonl"
    lines = queries(tmp_path, {"text": "Is it far?", "id": "far"})
    assert splice("run", workflow, "--queries", lines, "--store", path).code == 0
    assert splice("repair", workflow, "-q", QUESTION, "--store", path).code == 0
    return path


def test_recorded_runs_are_shown(splice: Splice, store: Path) -> None:
    done = splice("trace", "show", store)
    assert (done.code, done.err) == (0, "")
    assert "Query far in workflow trip" in done.out
    assert done.out.count("Query query in workflow trip") == 1
    only = splice("trace", "show", store, "--query", "far")
    assert "Query query" not in only.out
    full = splice("trace", "show", store, "--full")
    assert "You look up visas." in full.out


def test_recorded_runs_as_json_are_one_record_a_line(splice: Splice, store: Path) -> None:
    done = splice("trace", "show", store, "--json")
    first, second = done.out.splitlines()
    assert RepairResult.model_validate_json(first).query.id == "query"
    assert Trace.model_validate_json(second).query.id == "far"


def test_a_torn_last_line_is_reported_and_the_rest_is_shown(splice: Splice, store: Path) -> None:
    store.write_bytes(store.read_bytes() + b'{"kind":"trace","que')
    done = splice("trace", "show", store)
    assert done.code == 0
    assert "Query far in workflow trip" in done.out
    [note] = done.err.splitlines()
    assert note.startswith(f"{store}:")
    assert note.endswith("; left out")


def test_an_unknown_query_is_refused_with_those_that_are_there(splice: Splice, store: Path) -> None:
    done = splice("trace", "show", store, "--query", "near")
    assert (done.code, done.out) == (2, "")
    assert "'near'" in done.err
    assert "far, query" in done.err


def test_a_store_that_is_no_store_or_empty_is_told(
    splice: Splice, store: Path, tmp_path: Path
) -> None:
    assert "No such file" in splice("trace", "show", tmp_path / "none").error
    (tmp_path / "other").write_text("hello\n", "utf-8")
    assert str(tmp_path / "other") in splice("trace", "show", tmp_path / "other").error
    bare = tmp_path / "bare.jsonl"
    bare.write_bytes(store.read_bytes().splitlines(keepends=True)[0])
    assert splice("trace", "show", bare).error == f"{bare} holds no finished run"


def test_a_second_command_goes_on_from_the_store(
    splice: Splice, store: Path, workflow: Path, server: LoopbackServer
) -> None:
    n_before = server.n_requests
    done = splice("run", workflow, "-q", QUESTION, "--store", store, "--json")
    assert Trace.model_validate_json(done.out.strip()).answer == "unknown"
    assert server.n_requests == n_before


def test_secrets_of_the_environment_stay_out_of_the_store(
    splice: Splice,
    workflow: Path,
    tmp_path: Path,
    server: LoopbackServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "correct-horse-battery-staple-9"
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    path = tmp_path / "store.jsonl"
    assert splice("run", workflow, "-q", f"What is {secret}?", "--store", path).code == 0
    assert secret not in path.read_text("utf-8")


# --- as a process ----------------------------------------------------------------------------


def in_a_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", "from splice.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**keep, **environment},
    )


def test_stdout_holds_data_and_stderr_the_notes(
    workflow: Path, tmp_path: Path, server: LoopbackServer
) -> None:
    path = queries(tmp_path, {"text": QUESTION}, {"text": "Is it 31?"})
    done = in_a_process(
        "repair", workflow, "--queries", path, "--json", OPENAI_BASE_URL=server.base_url
    )
    assert done.returncode == 0
    batch = RepairBatch.model_validate_json(done.stdout)
    assert len(batch.results) == 2
    assert "repair" in done.stderr
    assert "\x1b" not in done.stdout


def test_an_error_is_one_line_on_stderr_without_a_traceback(tmp_path: Path) -> None:
    done = in_a_process("run", tmp_path / "none.toml", "-q", "x")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"error: {tmp_path}/none.toml: No such file or directory\n"


def test_wrong_usage_of_the_process_ends_with_2(workflow: Path) -> None:
    done = in_a_process("run", workflow)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--query" in done.stderr
