"""The generator and its pool: what is made, kept, gone on with and refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from pathlib import Path

import probed
import pytest

from probes.generate import GenerateSettings, generate
from probes.plan import ProbeSettings
from probes.pool import Damage, Manifest, Pool, is_in_use, read_manifest, read_shards
from probes.records import BaseRecord, ProbeRecord
from splice import Query, ScriptedModel
from splice.errors import ModelError, SettingsError, StoreError
from splice.ledger import Budget
from splice.lines import LineFile
from splice.records import Completion, Request
from splice.store import read_store
from splice.workload import Example


def bases(folder: Path) -> dict[str, BaseRecord]:
    return {id: base for shard in read_shards(folder) for id, base in shard.bases.items()}


def probes(folder: Path) -> list[ProbeRecord]:
    return [probe for shard in read_shards(folder) for probe in shard.probes.values()]


# --- what is made ----------------------------------------------------------------------------


def test_each_question_has_a_base_run_two_edges_and_a_share_of_them_controls(
    tmp_path: Path,
) -> None:
    made = probed.make(tmp_path / "pool", 40)
    found = probes(tmp_path / "pool")
    arms = Counter(probe.arm for probe in found)
    assert made.n_done == made.n_bases == len(bases(tmp_path / "pool")) == 40
    assert made.n_probes == len(found)
    assert arms["edge"] == 80
    assert 5 < arms["resample"] == arms["placebo"] < 30
    assert {probe.outcome for probe in found} == {"done"}


def test_a_record_says_what_moved_and_what_it_was_worth(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 60)
    known = bases(tmp_path / "pool")
    for probe in probes(tmp_path / "pool"):
        base = known[probe.base]
        assert probe.scores is not None
        assert base.score is not None
        assert probe.delta == probe.scores["right"] - base.score
        wanted = {1.0: "beneficial", 0.0: "neutral", -1.0: "harmful"}[probe.delta]
        assert probe.outcome_class == wanted
        assert probe.is_decisive == (probe.answer != base.answer)
        assert probe.is_gap == (probe.edge.ends == ("a", "b"))
        # The toy's receiver may say the same again, one time in 500; then nothing follows.
        assert probe.rerun in ((probe.edge.receiver, "w"), (probe.edge.receiver,))
        assert probe.rerun[-1] == "w" or not probe.is_decisive
        assert probe.ledger.n_calls == len(probe.rerun)
        assert probe.evidence is not None
        assert probe.features["dist_t"] == 1.0
        assert (probe.message is None) == (probe.arm == "resample")
        assert base.features["n_edges"] == 3.0
    found = probes(tmp_path / "pool")
    assert sum(probe.rerun[-1] == "w" for probe in found) > 0.9 * len(found)
    classes = Counter(probe.outcome_class for probe in found)
    assert set(classes) == {"beneficial", "neutral", "harmful"}


def test_a_placebo_has_the_length_of_the_message_and_none_of_its_names(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 30, probe=ProbeSettings(control_share=1.0))
    found = probes(tmp_path / "pool")
    real = {(p.base, p.edge.ends): p.message for p in found if p.arm == "edge"}
    placebos = [p for p in found if p.arm == "placebo"]
    assert len(placebos) == 30
    for probe in placebos:
        said, wanted = probe.message, real[probe.base, probe.edge.ends]
        assert said is not None
        assert wanted is not None
        assert len(said.text.split()) == len(wanted.text.split())
        assert "Person" not in said.text
        assert not any(c.isdigit() for c in said.text)
        assert said.focus is None
        assert said.writer == "placebo"


def test_a_resample_gets_another_seed_and_no_message(tmp_path: Path) -> None:
    asked: list[Request] = []

    def reply(request: Request) -> str:
        asked.append(request)
        return probed.reply(request)

    probe = ProbeSettings(control_share=1.0, resample_temperature=0.7)
    probed.make(tmp_path / "pool", 5, probe=probe, model=ScriptedModel(reply))
    again = [request for request in asked if request.rollout == 1]
    assert len(again) == 10
    assert {request.settings.temperature for request in again} == {0.7}
    assert {request.settings.temperature for request in asked if request.rollout != 1} == {0.0}


def test_traces_are_kept_and_referred_to(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 6)
    for shard in read_shards(tmp_path / "pool"):
        traces = read_store(tmp_path / "pool" / "traces-00000.jsonl").traces
        for record in (*shard.bases.values(), *shard.probes.values()):
            assert traces[record.trace or ""].answer == record.answer


def test_rollouts_have_seeds_of_their_own_and_the_same_edges(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 10, probe=ProbeSettings(n_rollouts=2, control_share=0.0))
    found = probes(tmp_path / "pool")
    by_rollout = {
        rollout: {(p.query_id, p.edge.ends) for p in found if p.rollout == rollout}
        for rollout in (0, 100)
    }
    assert by_rollout[0] == by_rollout[100]
    assert len(bases(tmp_path / "pool")) == 20


def test_the_manifest_says_what_the_pool_is(tmp_path: Path) -> None:
    workloads = {"train": probed.workload(5), "validation": probed.workload(3, begin=5)}
    probed.make(tmp_path / "pool", 0, workloads=workloads)
    manifest = read_manifest(tmp_path / "pool")
    assert manifest.workload == "toy"
    assert manifest.workflow == probed.WORKFLOW.fingerprint
    assert manifest.splits == {
        "train": ("q0", "q1", "q2", "q3", "q4"),
        "validation": ("q5", "q6", "q7"),
    }
    assert manifest.counts is not None
    assert manifest.counts.n_bases == manifest.n_wanted == 8
    assert set(manifest.files) == {f"{name}-00000.jsonl" for name in ("bases", "probes", "traces")}


# --- going on --------------------------------------------------------------------------------


def test_a_second_command_makes_nothing_again(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 12)
    before = probed.content(tmp_path / "pool")

    def refuse(request: Request) -> str:
        raise AssertionError("asked again")

    made = probed.make(tmp_path / "pool", 12, model=ScriptedModel(refuse))
    assert made.n_bases == made.n_probes == made.n_calls == 0
    assert made.n_done == 12
    assert probed.content(tmp_path / "pool") == before


@pytest.mark.parametrize("n_calls", [3, 4, 5, 7, 20, 61])
def test_a_pool_stopped_by_its_budget_and_gone_on_with_equals_one_made_at_once(
    tmp_path: Path, n_calls: int
) -> None:
    probed.make(tmp_path / "whole", 8)
    stopped = probed.make(tmp_path / "pool", 8, budget=Budget(max_calls=n_calls), concurrency=3)
    assert stopped.stop_reason == "budget"
    assert stopped.n_calls <= n_calls
    assert stopped.n_done < 8
    made = probed.make(tmp_path / "pool", 8)
    assert made.stop_reason == "done"
    assert probed.content(tmp_path / "pool") == probed.content(tmp_path / "whole")


def test_a_pool_stopped_by_time_goes_on(tmp_path: Path) -> None:
    stopped = probed.make(tmp_path / "pool", 5, max_seconds=1e-9)
    assert stopped.stop_reason == "time"
    assert stopped.n_probes == 0
    assert probed.make(tmp_path / "pool", 5).n_done == 5


def test_a_larger_limit_only_adds_and_does_not_depend_on_the_order_of_the_questions(
    tmp_path: Path,
) -> None:
    probed.make(tmp_path / "pool", 30, limit=5)
    five = {base.query_id for base in bases(tmp_path / "pool").values()}
    probed.make(tmp_path / "pool", 30, limit=9)
    nine = {base.query_id for base in bases(tmp_path / "pool").values()}
    assert len(five) == 5
    assert len(nine) == 9
    assert five < nine
    turned = probed.workload(30)
    turned = turned.model_copy(update={"examples": turned.examples[::-1]})
    probed.make(tmp_path / "turned", 30, limit=9, workloads={"train": turned})
    assert probed.content(tmp_path / "turned") == probed.content(tmp_path / "pool")


def test_more_edges_and_controls_can_be_asked_for_later_but_not_fewer(tmp_path: Path) -> None:
    one = ProbeSettings(n_edges=1, control_share=0.2)
    more = ProbeSettings(n_edges=2, control_share=0.4)
    probed.make(tmp_path / "pool", 20, probe=one)
    probed.make(tmp_path / "pool", 20, probe=more)
    probed.make(tmp_path / "whole", 20, probe=more)
    assert probed.content(tmp_path / "pool") == probed.content(tmp_path / "whole")
    with pytest.raises(SettingsError, match="begun with n_edges=2; it can be raised, not lowered"):
        probed.make(tmp_path / "pool", 20, probe=one)


def test_large_pools_come_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.pool.SHARD", 4)
    probed.make(tmp_path / "pool", 10, concurrency=3)
    assert [len(shard.bases) for shard in read_shards(tmp_path / "pool")] == [4, 4, 2]
    monkeypatch.undo()
    probed.make(tmp_path / "whole", 10)
    assert probed.content(tmp_path / "pool") == probed.content(tmp_path / "whole")


def test_what_a_kill_leaves_incomplete_is_cut_off_and_made_again(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    probed.make(pool, 6)
    whole = probed.content(pool)
    for name in ("bases", "probes"):
        path = pool / f"{name}-00000.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    with (pool / "traces-00000.jsonl").open("ab") as file:
        file.write(b'{"kind":"trace","que')
    probed.make(pool, 6)
    assert probed.content(pool) == whole


def test_a_poisoned_line_is_told_of_and_made_again(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    probed.make(pool, 6)
    whole = probed.content(pool)
    for name in ("bases", "probes"):
        path = pool / f"{name}-00000.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines[1] = b'{"schema_version":1,"id":"poison"}\n'
        path.write_bytes(b"".join(lines))
    damage: list[Damage] = []
    list(read_shards(pool, damage))
    assert [(line.file, line.line) for line in damage] == [
        ("bases-00000.jsonl", 2),
        ("probes-00000.jsonl", 2),
    ]
    made = probed.make(pool, 6)
    assert any("probes-00000.jsonl:2: not a probe record" in note for note in made.notes)
    assert probed.content(pool) == whole


# --- what fails ------------------------------------------------------------------------------


class Flaky(ScriptedModel):
    """Can't be reached for some questions."""

    def __init__(self, is_out: object) -> None:
        super().__init__(probed.reply)
        self.is_out = is_out

    async def complete(self, request: Request, on_retry: object) -> Completion:
        assert callable(self.is_out)
        if self.is_out(request):
            raise ModelError("the server hung up", reason="connection")
        return await super().complete(request, on_retry)  # type: ignore[arg-type]


def test_a_base_run_without_a_model_is_a_record_with_a_reason_and_has_no_probes(
    tmp_path: Path,
) -> None:
    pool = tmp_path / "pool"
    made = probed.make(pool, 8, model=Flaky(lambda request: request.query_id == "q3"))
    assert made.n_failed == 1
    (failed,) = (base for base in bases(pool).values() if base.failure is not None)
    assert failed.query_id == "q3"
    assert "the server hung up" in (failed.failure or "")
    assert failed.score is None
    assert "q3" not in {probe.query_id for probe in probes(pool)}


def test_failures_are_kept_and_made_again_only_when_asked_for(tmp_path: Path) -> None:
    pool = tmp_path / "pool"

    def is_out(request: Request) -> bool:
        is_trial = request.stage == "trial" and request.node == "w"
        return request.query_id == "q3" or (request.query_id == "q4" and is_trial)

    first = probed.make(pool, 8, model=Flaky(is_out))
    assert first.n_failed > 2
    assert {p.outcome for p in probes(pool) if p.query_id == "q4"} == {"failed"}
    assert all(p.reason for p in probes(pool) if p.query_id == "q4")
    again = probed.make(pool, 8)
    assert again.n_calls == 0
    retried = probed.make(pool, 8, retry_failed=True)
    assert retried.n_failed == 0
    assert f"{first.n_failed} failed records are made again" in retried.notes
    probed.make(tmp_path / "whole", 8)
    assert probed.content(pool) == probed.content(tmp_path / "whole")


def test_a_dead_endpoint_stops_the_command_and_says_what_to_do(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with pytest.raises(ModelError, match=r"5 failures one after another.*--retry-failed"):
        probed.make(pool, 50, model=Flaky(lambda request: True), max_failures=5, concurrency=2)
    assert 5 <= len(bases(pool)) <= 6
    probed.make(pool, 50, retry_failed=True)
    probed.make(tmp_path / "whole", 50)
    assert probed.content(pool) == probed.content(tmp_path / "whole")


def test_a_scorer_that_raises_is_a_failure_of_its_question(tmp_path: Path) -> None:
    def score(example: Example, answer: str | None) -> dict[str, float]:
        if example.query.id == "q2":
            raise ZeroDivisionError("no such year")
        return probed.score(example, answer)

    workloads = {"train": probed.workload(5).model_copy(update={"score": score})}
    made = probed.make(tmp_path / "pool", 5, workloads=workloads)
    assert made.n_failed == 1
    (failed,) = (base for base in bases(tmp_path / "pool").values() if base.failure)
    assert failed.failure == "the scorer raised ZeroDivisionError: no such year"


def test_a_full_disk_stops_the_command_and_nothing_finished_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 60_000

    class Full(LineFile):
        def _write_some(self, file: int, data: memoryview) -> int:
            nonlocal left
            if len(data) > left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left -= len(data)
            return os.write(file, data)

    pool = tmp_path / "pool"
    with monkeypatch.context() as patch:
        patch.setattr("probes.pool.LineFile", Full)
        patch.setattr("splice.store.LineFile", Full)
        with pytest.raises(
            StoreError, match="No space left on device; every record before is safe"
        ):
            probed.make(pool, 20)
    kept = probed.content(pool)
    assert len(kept) > 3
    probed.make(pool, 20)
    whole = probed.content(pool)
    assert kept.items() <= whole.items()
    probed.make(tmp_path / "whole", 20)
    assert whole == probed.content(tmp_path / "whole")


# --- what is refused -------------------------------------------------------------------------


def test_two_processes_on_one_pool_are_refused(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    probed.make(pool, 2)
    assert not is_in_use(pool)
    with Pool(pool, read_manifest(pool)):
        assert is_in_use(pool)
        with pytest.raises(StoreError, match="another process works on this pool"):
            probed.make(pool, 2)
        assert len(list(read_shards(pool))) == 1
    assert not is_in_use(pool)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"probe": ProbeSettings(seed=1)}, "seed is 0 there and 1 here"),
        ({"probe": ProbeSettings(epsilon=0.1)}, "epsilon is 0.01 there and 0.1 here"),
        ({"model": ScriptedModel(probed.reply, name="other")}, "scripted.* there and other"),
    ],
)
def test_another_pool_in_the_folder_is_refused_before_anything_is_asked(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    probed.make(tmp_path / "pool", 2, probe=ProbeSettings())
    before = probed.content(tmp_path / "pool")
    with pytest.raises(SettingsError, match=problem):
        probed.make(tmp_path / "pool", 2, **{"probe": ProbeSettings(), **change})
    assert probed.content(tmp_path / "pool") == before


def test_another_question_under_the_same_id_is_refused(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 3)
    other = Example(query=Query(id="q1", text="Another one?"), reference={"year": "1900"})
    workloads = {"train": probed.workload(1).model_copy(update={"examples": (other,)})}
    with pytest.raises(SettingsError, match="question 'q1' is another one in"):
        probed.make(tmp_path / "pool", 0, workloads=workloads)


def test_a_question_in_two_splits_is_refused(tmp_path: Path) -> None:
    workloads = {"train": probed.workload(3), "validation": probed.workload(3, begin=2)}
    with pytest.raises(SettingsError, match="question 'q2' stands in split train and in"):
        probed.make(tmp_path / "pool", 0, workloads=workloads)


def test_a_question_that_the_pool_has_in_another_split_is_refused(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 0, workloads={"train": probed.workload(3)})
    with pytest.raises(SettingsError, match=r"'q0' stands in split train in .* and in validation"):
        probed.make(tmp_path / "pool", 0, workloads={"validation": probed.workload(1)})


def test_splits_of_other_workloads_are_refused(tmp_path: Path) -> None:
    other = probed.workload(1, begin=5).model_copy(update={"name": "other"})
    with pytest.raises(SettingsError, match="merge them"):
        probed.make(tmp_path / "pool", 0, workloads={"train": probed.workload(1), "test": other})


def test_a_metric_that_the_workload_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no metric 'f2'; it has right"):
        probed.make(tmp_path / "pool", 1, probe=ProbeSettings(metric="f2"))


def test_a_folder_that_is_no_pool_and_a_newer_pool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is no probe pool: it has no manifest\.json"):
        list(read_shards(tmp_path))
    probed.make(tmp_path / "pool", 1)
    path = tmp_path / "pool" / "manifest.json"
    fields = json.loads(path.read_text()) | {"schema_version": 2}
    path.write_text(json.dumps(fields))
    with pytest.raises(StoreError, match="of pool format 2; this version reads up to 1"):
        read_manifest(tmp_path / "pool")


def test_a_manifest_is_its_own_file_format(tmp_path: Path) -> None:
    probed.make(tmp_path / "pool", 2)
    manifest = read_manifest(tmp_path / "pool")
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


async def test_progress_counts_up_to_all_questions(tmp_path: Path) -> None:
    told = []
    await generate(
        {"train": probed.workload(4)},
        ScriptedModel(probed.reply),
        tmp_path / "pool",
        settings=GenerateSettings(concurrency=2),
        progress=told.append,
    )
    assert told[0].n_done == 0
    assert [progress.n_done for progress in told] == sorted(progress.n_done for progress in told)
    assert told[-1].n_done == told[-1].n_questions == 4
    assert told[-1].n_probes >= 8


async def test_an_interrupted_command_lets_go_of_the_pool(tmp_path: Path) -> None:
    is_waiting = asyncio.Event()

    class Waiting(ScriptedModel):
        async def complete(self, request: Request, on_retry: object) -> Completion:
            if request.query_id == "q2":
                is_waiting.set()
                await asyncio.Event().wait()
            return await super().complete(request, on_retry)  # type: ignore[arg-type]

    workloads = {"train": probed.workload(5)}
    work = asyncio.create_task(generate(workloads, Waiting(probed.reply), tmp_path / "pool"))
    await is_waiting.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not is_in_use(tmp_path / "pool")
    made = await generate(workloads, ScriptedModel(probed.reply), tmp_path / "pool")
    assert made.n_done == 5
