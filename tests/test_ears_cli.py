"""`splice ears`: the four commands, told apart by what they ask, write, refuse and go on with."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import test_ears_evaluation as desk
from typer.testing import CliRunner, Result

from splice import cli, ears_cli
from splice.ears.calibration import is_held_out
from splice.ears.curation import Curated
from splice.ears.ensemble import CurationCard
from splice.ears.evaluation import AbstentionResult
from splice.ears.flywheel import CalibrationCard
from splice.ears.interactions import Interaction, Label
from splice.ears.judging import default_guideline
from splice.errors import DataError, ModelError, SettingsError, SpliceError, StoreError
from splice.models.scripted import Responder, ScriptedModel
from splice.records import Query, Request
from splice.store import TraceStore
from splice.workflow import Workflow, load_workflow

# --- models by name --------------------------------------------------------------------------


class Models:
    """Scripted models by name, in the place of the endpoint; it counts what each is asked."""

    def __init__(self) -> None:
        self.responders: dict[str, Responder] = {}
        self.asked: Counter[str] = Counter()
        self.is_open: list[str] = []

    def open(self, workflow: Workflow, name: str | None = None, *, threads: int = 1) -> object:
        known = name or "default"
        if known not in self.responders:
            raise SettingsError(f"no model {known!r}; there are {', '.join(self.responders)}")
        models = self

        class Model(ScriptedModel):
            async def aclose(self) -> None:
                models.is_open.remove(known)

        def respond(request: Request) -> object:
            models.asked[known] += 1
            return models.responders[known](request)

        self.is_open.append(known)
        return Model(respond, name=known)  # type: ignore[arg-type]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    found = Models()
    monkeypatch.setattr("splice.models.default.default_model", found.open)
    return found


def ears(*arguments: object, **more: object) -> Result:
    return CliRunner().invoke(cli.app, ["ears", *map(str, arguments)], **more)  # type: ignore[arg-type]


def done(*arguments: object, **more: object) -> Result:
    result = ears(*arguments, **more)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(error: type[SpliceError], *arguments: object) -> str:
    result = ears(*arguments)
    assert isinstance(result.exception, error), (result.output, result.exception)
    return str(result.exception)


def usage(*arguments: object) -> str:
    """What wrong usage is told, on one line."""
    result = ears(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    return " ".join(result.output.replace("│", " ").split())


def test_the_group_lists_its_commands() -> None:
    listed = done("--help").output
    for name in ("calibrate", "curate", "evaluate", "flywheel"):
        assert re.search(rf"^ +{name} ", listed, re.M)


# --- evaluate --------------------------------------------------------------------------------

EVALUATE = ("evaluate", "test_ears_evaluation:load")


def test_evaluate_compares_both_modes_and_asks_nothing_twice(
    tmp_path: Path, models: Models
) -> None:
    models.responders["default"] = desk.replying
    first = done(*EVALUATE, "--out", tmp_path)
    assert models.asked["default"] == 2 * desk.N
    assert models.is_open == []
    again = done(*EVALUATE, "--out", tmp_path, "--json")
    assert models.asked["default"] == 2 * desk.N
    result = AbstentionResult.model_validate_json(again.stdout)
    assert [found.arm.name for found in result.arms] == ["baseline", "prompted"]
    assert first.stdout == f"{result.text()}\n" == (tmp_path / "table.txt").read_text("utf-8")
    assert "10 examples of desk; arms baseline, prompted" in first.stderr


def test_another_arm_asks_for_nothing_but_its_own_replies(tmp_path: Path, models: Models) -> None:
    models.responders |= {"default": desk.replying, "small+./a.gguf": desk.replying}
    done(*EVALUATE, "--out", tmp_path)
    arms = ("base=baseline", "prompted=prompted", "tuned=prompted:small+./a.gguf")
    options = [word for arm in arms for word in ("--arm", arm)]
    result = AbstentionResult.model_validate_json(
        done(*EVALUATE, "--out", tmp_path, *options, "--json").stdout
    )
    assert models.asked == {"default": 2 * desk.N, "small+./a.gguf": desk.N}
    assert result.arms[2].model.name == "small+./a.gguf"
    command = (tmp_path / "command.txt").read_text("utf-8").split()
    assert command[:4] == ["splice", "ears", *EVALUATE]
    assert command[-1] == "--json"
    assert command.count("--arm") == 3


def test_evaluate_goes_on_after_a_failure_and_retries_it(tmp_path: Path, models: Models) -> None:
    def failing(request: Request) -> str | Exception:
        if desk.number_in(request) == 3:
            return ModelError("out of order", reason="server_error")
        return desk.replying(request)

    models.responders["default"] = failing
    assert "no answer about 1" in done(*EVALUATE, "--out", tmp_path).stdout
    models.responders["default"] = desk.replying
    assert "no answer" not in done(*EVALUATE, "--out", tmp_path).stdout
    assert models.asked["default"] == 2 * desk.N + 2


def test_a_folder_with_other_examples_is_refused_naming_what_differs(
    tmp_path: Path, models: Models
) -> None:
    models.responders["default"] = desk.replying
    done(*EVALUATE, "--out", tmp_path, "--limit", 4)
    n = models.asked["default"]
    told = refused(SettingsError, *EVALUATE, "--out", tmp_path, "--limit", 5)
    assert "holds another evaluation: examples is" in told
    assert models.asked["default"] == n == 8


def test_a_model_that_is_not_there_is_found_out_before_a_paid_call(
    tmp_path: Path, models: Models
) -> None:
    models.responders["default"] = desk.replying
    arms = ("--arm", "a=baseline", "--arm", "b=prompted:gone")
    assert "no model 'gone'" in refused(SettingsError, *EVALUATE, "--out", tmp_path, *arms)
    assert models.asked["default"] == 0


@pytest.mark.parametrize(
    ("arms", "problem"),
    [
        (["a"], "--arm 'a' is not NAME=MODE[:MODEL]"),
        (["a=silent"], "MODE is one of baseline, prompted"),
        (["=baseline"], "is not NAME=MODE[:MODEL]"),
        (["a/b=baseline"], "NAME is letters, digits"),
        (["a=baseline:"], "is not NAME=MODE[:MODEL]"),
        (["a=baseline", "a=prompted"], "--arm: there are 2 named 'a'"),
    ],
)
def test_an_arm_in_another_form_is_wrong_usage(
    arms: list[str], problem: str, tmp_path: Path
) -> None:
    options = [word for arm in arms for word in ("--arm", arm)]
    assert problem in usage(*EVALUATE, "--out", tmp_path, *options)


# --- calibrate -------------------------------------------------------------------------------


def verdict(label: Label, rationale: str = "no such number") -> str:
    verdict, reason = {
        "Solvable": ("solvable", "none"),
        "Missing Capability": ("not_solvable", "missing_capability"),
        "Misrouting": ("not_solvable", "misrouting"),
    }[label]
    return json.dumps({"rationale": rationale, "verdict": verdict, "reason": reason})


def row(n: int, **more: object) -> Interaction:
    """Even numbers are solvable, odd ones are not."""
    fields = {
        "source": "made",
        "agent": "desk",
        "context": "You book.",
        "reply": f"booked {n}",
        "label": "Missing Capability" if n % 2 else "Solvable",
        **more,
    }
    return Interaction.model_validate({"id": f"row{n}", "query": f"Book number {n}.", **fields})


def written(path: Path, rows: list[Interaction]) -> Path:
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in rows), "utf-8")
    return path


@pytest.fixture
def seed_set(tmp_path: Path) -> Path:
    return written(tmp_path / "seed.jsonl", [row(n) for n in range(24)])


def number_in(request: Request) -> int:
    return int(re.findall(r"Book number (\d+)\.", request.messages[0].content)[0])


def judging(request: Request) -> str:
    """Right about numbers below the skill that the guideline gives, else about none."""
    skills = re.findall(r"SKILL (\d+)", request.messages[0].content)
    n = number_in(request)
    is_right = n < int(skills[0]) if skills else n < 8
    return verdict("Missing Capability" if bool(n % 2) == is_right else "Solvable")


def critic(*skills: int) -> Callable[[Request], str]:
    left = list(skills)

    def revise(request: Request) -> str:
        return f"It \x1b[31moverlooks odd numbers.\n\nREVISED GUIDELINE\nSKILL {left.pop(0)}\n"

    return revise


def test_calibrate_prints_the_rounds_and_writes_the_best_guideline(
    tmp_path: Path, models: Models, seed_set: Path
) -> None:
    models.responders |= {"j": judging, "c": critic(20, 24)}
    out = tmp_path / "out"
    asked = ("calibrate", seed_set, "--out", out, "--judge", "j", "--critic", "c")
    result = done(*asked, "--approve", "held-out")
    assert (out / "guideline.txt").read_text("utf-8") == "SKILL 24\n"
    assert "version 2 approved" in result.stdout
    assert "the judge is right everywhere" in result.stdout
    n_held_out = sum(is_held_out(f"row{n}", 0) for n in range(24))
    last = next(line.split() for line in result.stdout.splitlines() if line.startswith("3 "))
    assert last[:6] == ["3", "3", str(24 - n_held_out), "1.000", str(n_held_out), "1.000"]
    assert "round 1: version 1, accuracy" in result.stderr
    n = Counter(models.asked)
    again = done(*asked, "--approve", "held-out", "--json")
    assert models.asked == n
    card = CalibrationCard.model_validate_json(again.stdout)
    assert card.calibration.best.guideline.version == 3
    assert (card.judge.name, card.critic.name) == ("j", "c")
    assert models.is_open == []


def test_calibrate_asks_and_shows_what_changes(
    tmp_path: Path, models: Models, seed_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ears_cli, "_is_terminal", lambda: True)
    models.responders |= {
        "default": lambda request: (
            revise(request)
            if "REVISED GUIDELINE" in request.messages[0].content
            else judging(request)
        )
    }
    revise = critic(20, 24)
    out = tmp_path / "out"
    start = tmp_path / "start.txt"
    start.write_text("SKILL 8\n", "utf-8")
    asked = ("calibrate", seed_set, "--out", out, "--guideline", start, "--rounds", 2)
    result = done(*asked, input="n\n")
    assert "-SKILL 8\n+SKILL 20\n" in result.stderr
    assert re.search(r"held out: 0\.\d+ before, \d\.\d+ after\.", result.stderr)
    assert "overlooks odd numbers" in result.stderr
    assert "\x1b" not in result.output
    assert "Go on with version 2?" in result.stderr
    assert "version 2 not approved" in result.stdout
    assert (out / "guideline.txt").read_text("utf-8") == "SKILL 8\n"


def test_without_a_terminal_calibrate_says_how_to_go_on(
    tmp_path: Path, models: Models, seed_set: Path
) -> None:
    assert "--approve held-out" in usage("calibrate", seed_set, "--out", tmp_path / "out")
    assert not models.asked


def test_calibrate_refuses_what_it_cant_use_before_a_call(
    tmp_path: Path, models: Models, seed_set: Path
) -> None:
    models.responders |= {"j": judging, "k": judging, "c": critic(24)}

    def arguments(*more: object) -> tuple[object, ...]:
        models_ = ("--judge", "j", "--critic", "c", "--approve", "held-out")
        return ("calibrate", seed_set, "--out", tmp_path / "out", *models_, *more)

    empty = tmp_path / "empty.txt"
    empty.write_text(" \n", "utf-8")
    assert refused(SettingsError, *arguments("--guideline", empty)) == (
        f"{empty}: the guideline is empty"
    )
    assert "is a file" in usage(*arguments("--data", tmp_path))
    assert not models.asked
    done(*arguments())
    n = Counter(models.asked)
    told = refused(SettingsError, *arguments("--judge", "k"))
    assert "judge is {'name': 'j'" in told
    assert models.asked == n


def test_calibrate_takes_a_labelled_workload(tmp_path: Path, models: Models) -> None:
    def right(request: Request) -> str:
        n = number_in(request)
        return verdict("Solvable") if n < 6 else verdict("Misrouting")

    models.responders |= {"default": right}
    result = done(
        *("calibrate", "test_ears_evaluation:load", "--out", tmp_path / "out"),
        *("--approve", "held-out", "--rounds", 1),
    )
    assert "10 interactions of desk, train" in result.stderr


# --- curate ----------------------------------------------------------------------------------


def curate(out: Path, rows: object, *judges: str, **options: object) -> tuple[object, ...]:
    given = [word for judge in judges for word in ("--judge", judge)]
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ("curate", rows, "--out", out, *given, *more)


def instances(out: Path) -> list[Curated]:
    lines = (out / "instances.jsonl").read_text("utf-8").splitlines()
    return [Curated.model_validate_json(line) for line in lines]


def saying(label: Callable[[int], Label]) -> Responder:
    return lambda request: verdict(label(number_in(request)))


def odd(n: int) -> Label:
    return "Missing Capability" if n % 2 else "Solvable"


@pytest.fixture
def judges(models: Models) -> Models:
    models.responders |= {
        "good": saying(odd),
        "bold": saying(lambda n: "Missing Capability" if n % 2 or n == 2 else "Solvable"),
        "shy": saying(lambda n: "Missing Capability" if n in (1, 3) else "Solvable"),
    }
    return models


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", [row(n) for n in range(8)])


def test_curate_writes_instances_and_a_card_and_scores_each_k(
    tmp_path: Path, judges: Models, rows: Path
) -> None:
    out = tmp_path / "out"
    asked = curate(out, rows, "a=good", "b=bold", "c=shy")
    result = done(*asked)
    made = instances(out)
    assert {one.interaction.id for one in made if one.label != "Solvable"} == {"row1", "row3"}
    assert (out / "human.jsonl").read_text("utf-8") == ""
    card = CurationCard.model_validate_json((out / "card.json").read_text("utf-8"))
    assert [judge.name for judge in card.judges] == ["a", "b", "c"]
    assert {judge.guideline for judge in card.judges} == {default_guideline().digest}
    assert [judge.spending.n_calls for judge in card.judges] == [8, 8, 8]
    assert all(judge.spending.tokens > 0 for judge in card.judges)
    assert card.k == 3
    assert card.instances == {"Solvable": 6, "Missing Capability": 2}
    assert card.table is not None
    recall = [one.recall and one.recall.n_hits for one in card.table.by_k]
    precision = [one.precision and one.precision.value for one in card.table.by_k]
    assert recall == [4, 4, 2]
    assert precision == [1.0, 1.0, 1.0]
    alone = {one.way: one.precision and one.precision.n for one in card.table.judges}
    assert alone == {"a": 4, "b": 5, "c": 2}
    assert "k = 3" in result.stdout
    assert card.text() in result.stdout
    assert judges.is_open == []


def test_curate_goes_on_and_another_judge_asks_for_its_own_verdicts(
    tmp_path: Path, judges: Models, rows: Path
) -> None:
    out = tmp_path / "out"
    done(*curate(out, rows, "a=good"))
    n = judges.asked["good"]
    card = CurationCard.model_validate_json(
        done(*curate(out, rows, "a=good", "c=shy"), "--json").stdout
    )
    assert judges.asked == {"good": n, "shy": 8}
    assert [judge.spending.n_calls for judge in card.judges] == [8, 8]


def test_curate_asks_the_rest_where_a_judge_failed(
    tmp_path: Path, judges: Models, rows: Path
) -> None:
    def failing(request: Request) -> str | Exception:
        if number_in(request) == 5:
            return ModelError("out of order", reason="server_error")
        return verdict("Solvable")

    judges.responders["frail"] = failing
    out = tmp_path / "out"
    asked = curate(out, rows, "f=frail", "a=good")
    told = refused(ModelError, *asked)
    assert "'f' about 1 (no answer: out of order)" in told
    assert not (out / "instances.jsonl").exists()
    judges.responders["frail"] = saying(odd)
    done(*asked)
    assert judges.asked == {"frail": 9, "good": 8}


def test_a_folder_of_another_judge_or_set_is_refused_naming_what_differs(
    tmp_path: Path, judges: Models, rows: Path
) -> None:
    out = tmp_path / "out"
    done(*curate(out, rows, "a=good"))
    n = Counter(judges.asked)
    assert "model is {'name': 'good'" in refused(SettingsError, *curate(out, rows, "a=shy"))
    text = tmp_path / "guideline.txt"
    text.write_text("Decide.\n", "utf-8")
    assert "guideline is" in refused(SettingsError, *curate(out, rows, f"a=good,{text}"))
    other = written(tmp_path / "other.jsonl", [row(1)])
    assert "interactions is" in refused(SettingsError, *curate(out, other, "a=good"))
    assert judges.asked == n


def test_a_judge_follows_the_guideline_that_a_calibration_wrote(
    tmp_path: Path, models: Models, seed_set: Path
) -> None:
    models.responders |= {"j": judging, "c": critic(24)}
    done(
        *("calibrate", seed_set, "--out", tmp_path / "cal", "--judge", "j", "--critic", "c"),
        *("--approve", "held-out"),
    )
    made = CalibrationCard.model_validate_json((tmp_path / "cal" / "calibration.json").read_text())
    out = tmp_path / "out"
    done(*curate(out, seed_set, f"a=j,{tmp_path / 'cal' / 'guideline.txt'}"))
    card = CurationCard.model_validate_json((out / "card.json").read_text("utf-8"))
    assert card.judges[0].guideline == made.calibration.best.guideline.digest
    assert card.table is not None
    assert card.table.by_k[0].recall is not None
    assert card.table.by_k[0].recall.value == 1.0


WORKFLOW = """\
name = "desk"
output = "desk"
edges = []

[[nodes]]
id = "desk"
role = "You book."
"""


def test_curate_takes_the_engines_own_traces(tmp_path: Path, judges: Models) -> None:
    import splice

    path, store = tmp_path / "desk.toml", tmp_path / "traces.jsonl"
    path.write_text(WORKFLOW, "utf-8")
    with TraceStore(store) as opened:
        for n in range(3):
            splice.run(
                load_workflow(path),
                Query(id=f"q{n}", text=f"Book number {n}."),
                model=ScriptedModel({"desk": [f"booked {n}"]}),
                store=opened,
            )
    out = tmp_path / "out"
    asked = ("curate", "--traces", store, "--workflow", path, "--out", out, "--judge", "a=good")
    done(*asked)
    made = instances(out)
    assert [one.interaction.reply for one in made] == ["booked 0", "booked 1", "booked 2"]
    assert CurationCard.model_validate_json((out / "card.json").read_text()).table is None
    with TraceStore(tmp_path / "empty.jsonl"):
        pass
    empty = (*asked[:2], tmp_path / "empty.jsonl", *asked[3:])
    assert "holds no run" in refused(StoreError, *empty)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--judge", "a=m"], "give either INTERACTIONS or --traces"),
        (["x.jsonl", "--judge", "a=m", "--traces", "s"], "give either INTERACTIONS or --traces"),
        (["--judge", "a=m", "--traces", "s"], "--traces and --workflow go together"),
        (["x.jsonl", "--judge", "a=m", "--code", "c.py"], "--code goes with --workflow"),
        (["x.jsonl", "--judge", "a"], "--judge 'a' is not NAME=MODEL[,GUIDELINE]"),
        (["x.jsonl", "--judge", "a=m,"], "is not NAME=MODEL[,GUIDELINE]"),
        (["x.jsonl", "--judge", "../a=m"], "NAME is letters, digits"),
        (["x.jsonl", "--judge", "a=m", "--judge", "a=n"], "--judge: there are 2 named 'a'"),
        (["x.jsonl", "--judge", "a=m", "--k", "2"], "--k 2: there are 1 judges"),
        (["x.jsonl"], "--judge"),
    ],
)
def test_wrong_usage_of_curate_is_explained(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    assert problem in usage("curate", "--out", tmp_path, *arguments)


def test_names_from_files_do_a_terminal_no_harm(tmp_path: Path, models: Models) -> None:
    loud = [row(n, agent="a\x1b[2J", context="c\x1b[31m", source="s\x07") for n in range(2)]
    models.responders["m"] = saying(odd)
    path = written(tmp_path / "loud.jsonl", loud)
    result = done(*curate(tmp_path / "out", path, "a=m"))
    assert "\x1b" not in result.output
    path.write_text('{"id": "\\u001b[31m", "label": "\\u001b[2J"}\n', "utf-8")
    assert "\x1b" not in refused(DataError, *curate(tmp_path / "new", path, "a=m"))


# --- flywheel --------------------------------------------------------------------------------


def test_a_turn_of_the_flywheel_is_led_by_its_own_commands(
    tmp_path: Path, models: Models, seed_set: Path
) -> None:
    models.responders |= {"j": judging, "c": critic(24), "default": desk.replying}
    folder = tmp_path / "wheel"

    def following(**filled: str) -> list[str]:
        """The proposed command, with what only its user knows filled in."""
        step = json.loads(done("flywheel", folder, "--json").stdout)["next_step"]
        words = shlex.split(step["command"])
        return [filled.get(word.partition("=")[0], word) for word in words][2:]

    done(
        *following(SEED_SET=str(seed_set)),
        *("--judge", "j", "--critic", "c", "--approve", "held-out"),
    )
    guideline = folder / "cycle-1" / "calibration" / "guideline.txt"
    done(*following(INTERACTIONS=str(seed_set), NAME=f"a=j,{guideline}"))
    assert following()[0] == "train-agent"
    (folder / "cycle-1" / "agent").mkdir()
    done(*following(WORKLOAD="test_ears_evaluation:load"))
    recorded = done(*following()).stdout
    assert "1      version 2" in recorded
    assert "Next: calibrate the judge." in recorded
    assert str(seed_set) in recorded
    state = json.loads(done("flywheel", folder, "--json").stdout)
    assert (len(state["cycles"]), state["is_settled"], state["changed"]) == (1, False, [])
    assert state["cycles"][0]["passed"]["n_hits"] == 7
    assert state["cycles"][0]["before"]["n_hits"] == 5


PRICES = {
    "--price": 0.009,
    "--curation-cost": 2525,
    "--gpu-hours": 192,
    "--gpu-price": 4,
}


def test_costs_are_those_of_the_paper(tmp_path: Path) -> None:
    prices = [word for pair in PRICES.items() for word in pair]
    judges = [word for cost in (4.1, 6, 9.3, 1) for word in ("--relative-cost", cost)]
    text = done("flywheel", tmp_path, *prices, *judges).stdout
    assert "Judging every reply costs 183.60 for 1,000 queries;" in text
    assert "curating and training once costs 3,293.00." in text
    assert "They break even at 17,936 queries." in text
    found = json.loads(done("flywheel", tmp_path, *prices, *judges, "--json").stdout)
    assert found["costs"]["offline"] == 3293


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--add"], "--add needs --calibration, --curation, --evaluation"),
        (["--curation", "x"], "go with --add"),
        (["--price", "1"], "costs need --relative-cost, --curation-cost, --gpu-hours, --gpu-price"),
    ],
)
def test_wrong_usage_of_flywheel_is_explained(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    assert problem in usage("flywheel", tmp_path, *arguments)
