"""The benchmarks run and give right answers; how fast they are is nobody's business here."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_evaluation import model, workload

from skeletons.multihop.dealing import deal
from skeletons.multihop.questions import Paragraph, Question, Step
from splice.errors import StoreError
from splice.evaluation import EvaluationSettings, evaluate

ROOT = Path(__file__).parent.parent
REASON = "benchmarks/ is importable from the root of the repository only"
graphs = pytest.importorskip("benchmarks.graphs", reason=REASON)
endtoend = pytest.importorskip("benchmarks.endtoend", reason=REASON)
engines = pytest.importorskip("benchmarks.engines", reason=REASON)
learned = pytest.importorskip("benchmarks.learned", reason=REASON)
pool = pytest.importorskip("benchmarks.pool", reason=REASON)
report = pytest.importorskip("benchmarks.report", reason=REASON)
speed = pytest.importorskip("benchmarks.speed", reason=REASON)
stages = pytest.importorskip("benchmarks.stages", reason=REASON)
storage = pytest.importorskip("benchmarks.storage", reason=REASON)
trials = pytest.importorskip("benchmarks.trials", reason=REASON)
bare = pytest.importorskip("benchmarks.engines.bare", reason=REASON)
bare_wait = pytest.importorskip("benchmarks.engines.bare_wait", reason=REASON)
ours = pytest.importorskip("benchmarks.engines.splice", reason=REASON)

ALWAYS_THERE = (bare, bare_wait, ours)


@pytest.mark.parametrize("engine", ALWAYS_THERE, ids=lambda engine: engine.NAME)
@pytest.mark.parametrize(
    "graph",
    [
        graphs.chain(3),
        graphs.fan(3),
        graphs.layered((2, 3, 1)),
        graphs.random_dag(30, seed=1),
    ],
    ids=lambda graph: graph.name,
)
async def test_an_engine_gives_the_right_answer_to_each_query(engine, graph):
    run = engine.build(graph, graphs.body_of(graph))
    assert await run("first") == graphs.answer_to(graph, "first")
    assert await run("second") == graphs.answer_to(graph, "second")


def test_the_right_answer_depends_on_every_edge():
    graph = graphs.random_dag(12, seed=3)
    right = graphs.answer_to(graph, "q")
    for source, receiver in graph.edges:
        fewer = tuple(p for p in graph.parents[receiver] if p != source)
        without = graphs.Graph("one edge less", {**graph.parents, receiver: fewer})
        assert graphs.answer_to(without, "q") != right


def test_the_skewed_graph_has_its_two_branches_side_by_side():
    assert graphs.skewed().critical_path_s == pytest.approx(0.106)
    assert speed.LATENCY.critical_path_s == pytest.approx(0.250)
    assert len(speed.LATENCY.nodes) == 12


async def test_an_engine_that_answers_wrongly_is_named_and_not_timed():
    class Liar:
        NAME = "liar"
        DISTRIBUTIONS = ()

        @staticmethod
        def build(graph, body):
            async def run(query):
                return "42"

            return run

    found = await speed.overhead([bare, Liar], rounds=1, graphs=[graphs.chain(2)])
    assert found["chain of 2"][bare.NAME] > 0
    assert "answer '42' to 'first' is wrong" in found["chain of 2"]["liar"]["refused"]


async def test_every_measurement_gives_numbers_and_a_page():
    quick = graphs.Graph("quick", {"a": (), "b": ("a",)}, {"a": 0.001, "b": 0.001})
    results = {
        "machine": report.machine(engines.Engines(ALWAYS_THERE, ())),
        "left_out": ["haystack"],
        "speed": {
            "overhead_us": await speed.overhead(
                ALWAYS_THERE, 1, graphs=[graphs.chain(2), graphs.fan(2)]
            ),
            "barrier": await speed.barrier(ALWAYS_THERE, 1, quick),
            "crowd": await speed.crowd(ALWAYS_THERE, 1, quick, size=3),
        },
        "trials": await trials.measure_trials(5),
        "storage": await storage.measure_storage(2, 3),
    }
    for values in (*results["speed"]["overhead_us"].values(), results["speed"]["barrier"]):
        assert values.keys() == {engine.NAME for engine in ALWAYS_THERE}
        assert all(value > 0 for value in values.values())
    assert results["storage"]["ways"]["SPLICE"]["kib"] > results["storage"]["payload_kib"]
    page = report.markdown(results)
    assert "Left out because not installed: haystack." in page
    assert "| µs a node | chain of 2 | fan 1-2-1 |" in page


async def test_trials_execute_the_nodes_whose_input_changed_and_no_others():
    found = await trials.measure_trials(25)
    assert found["n_trials"] == 25
    assert found["nodes"]["splice"] == found["nodes"]["needed"]
    assert found["nodes"]["needed"] < found["nodes"]["descendants"] < found["nodes"]["everything"]


def test_a_block_is_replaced_and_the_page_around_it_stays():
    page = f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n"
    assert report.replace_block(page, "new") == f"above\n{report.BEGIN}\nnew\n{report.END}\nbelow\n"
    with pytest.raises(ValueError, match="the page has no"):
        report.replace_block("no markers", "new")


def test_the_mean_in_work_counts_only_what_lies_between_the_two_moments():
    log = [(0.0, 1), (1.0, 1), (3.0, -1), (9.0, -1)]
    assert pool.mean_in_work(log, 0.5, 4.5) == pytest.approx((0.5 * 1 + 2 * 2 + 1.5 * 1) / 4)


def test_a_server_with_few_places_works_on_no_more_requests_than_these():
    # In a process of its own, as the generator's are forks of it.
    small = "--probes 20 --limit 6 --places 2 --open 4 --latency 0.01 --memory-probes 0"
    command = [sys.executable, "-m", "benchmarks.pool", *small.split(), "--processes", "1", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line.split("|")[1:5] for line in done.stdout.splitlines()[2:]]
    assert [[int(cell) for cell in row[:3]] for row in rows] == [[1, 4, 6], [2, 4, 6]]
    for row in rows:
        in_work, of = row[3].split(" of ")
        assert 0 < float(in_work) <= 2
        assert int(of) == 2


def test_a_step_is_timed_without_its_first_run():
    found = learned.latency("a step", [9.0, 0.001, 0.002, 0.003])
    assert (found.step, found.n) == ("a step", 3)
    assert found.median_ms == pytest.approx(2.0)
    assert found.p99_ms == pytest.approx(2.98)
    assert "| a step | 3 | 2.000 | 2.980 |" in learned.table([found])


async def test_pooled_tables_count_the_questions_of_every_run(tmp_path):
    settings = EvaluationSettings(policies=("static", "splice"))
    more = EvaluationSettings(policies=("static", "splice", "never"))
    for name, own in (("one", settings), ("two", more)):
        await evaluate(workload(), model(), split="test", settings=own, folder=tmp_path / name)
    found = endtoend.together(tmp_path, ["one", "two"])
    head, static, splice = (line.split() for line in endtoend.pooled(found))
    assert head[:4] == ["policy", "b", "n", "score"]
    assert static[:4] == ["static", "-", "20", "0.500"]
    assert splice[:4] == ["splice", "0.5", "20", "1.000"]
    _, row = (line.split() for line in endtoend.compared(found))
    assert row[:4] == ["static", "0.5", "20", "+0.500"]
    with pytest.raises(StoreError, match="three"):
        endtoend.together(tmp_path, ["one", "three"])


def test_each_run_is_a_command_of_its_own():
    planned = next(run for run in endtoend.RUNS if run.name == "2wiki-planned")
    found = endtoend.command(planned, Path("data"), Path("out"), ["--limit", "3"])
    assert " ".join(found[1:]) == (
        "-m splice evaluate multihop --data data/multihop_2wiki --out out/2wiki-planned "
        "--seed 0 -o subtasks=planned --limit 3"
    )
    names = [run.name for run in endtoend.RUNS]
    assert {name for group in endtoend.POOLED.values() for name in group} <= set(names)


async def test_the_memory_of_a_growing_pool_is_sampled():
    found = await pool.memory(20, n_open=4, n_samples=4)
    assert found.mib[-1][0] >= 20 > found.mib[0][0]
    assert all(mib > 0 for _, mib in found.mib)
    assert "| peak | " in pool.memory_table(found)


def test_stages_look_for_the_fact_that_is_sent_and_for_what_it_is_good_for():
    maker = Step(paragraph=0, subjects=("Opus",), answer="Ana")
    town = Step(paragraph=1, subjects=("Ana",), answer="Faro", needs=(0,))
    question = Question(
        id="q",
        source="2wiki",
        text="Where was the director of Opus born?",
        answer="Faro",
        kind="compositional",
        paragraphs=tuple(
            Paragraph(title=title, sentences=(text,), is_supporting=True, key=(0,))
            for title, text in (("Opus", "Opus is a film by Ana."), ("Ana", "Ana is from Faro."))
        ),
        steps=(maker, town),
    )
    hands = deal(question)
    holder = next(name for name in ("second", "third") if 1 in hands[name].paragraphs)
    other = {"second": "third", "third": "second"}[holder]
    known = stages.Known(question, hands)
    assert stages.facts(known, ("first", holder)) == stages.Facts(("Ana",), ("Faro",))
    assert stages.facts(known, ("first", other)) == stages.Facts((), ())
    assert stages.facts(known, (holder, "writer")) == stages.Facts(("Faro",), ("Faro",))


def test_each_stage_counts_what_came_through_those_before():
    def case(is_found, is_used, after):
        return stages.Case("2wiki", is_found, is_found, False, is_used, 0.0, after)

    found = [case(True, True, 1.0), case(True, True, 0.0), case(True, False, 1.0)]
    found += [case(False, True, 1.0)]
    assert [len(left) for _, left in stages.stages(found)] == [4, 3, 3, 3, 2, 1]
    assert stages.table(found)[-1].split()[-5:] == ["0.50", "[0.09,", "0.91]", "0.000", "1.000"]
