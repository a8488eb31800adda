"""Kill -9 again and again: the pool in the end is the one that was never disturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import probed
import pytest

N_QUESTIONS = 184
"""Some 500 probes: two edges each, and controls for two questions in five."""

SCRIPT = """
import sys
from pathlib import Path
import probed
from splice import ScriptedModel
probed.make(
    Path(sys.argv[1]), int(sys.argv[2]), model=ScriptedModel(probed.reply, latency_s=0.002),
    concurrency=4,
)
"""


def n_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*-*.jsonl"))


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    probed.make(tmp_path / "whole", N_QUESTIONS)
    whole = probed.content(tmp_path / "whole")
    n_probes = len(whole) - N_QUESTIONS
    assert n_probes >= 500
    pool = tmp_path / "pool"
    rng = random.Random(20)
    step = n_bytes(tmp_path / "whole") // 24
    command = [sys.executable, "-c", SCRIPT, str(pool), str(N_QUESTIONS)]
    n_killed = 0
    for _ in range(20):
        wanted = n_bytes(pool) + rng.randint(step // 2, step)
        with subprocess.Popen(command, cwd=Path(__file__).parent) as process:
            while n_bytes(pool) < wanted and process.poll() is None:
                time.sleep(0.002)
            process.kill()
        n_killed += process.returncode == -signal.SIGKILL
    assert n_killed == 20
    subprocess.run(command, cwd=Path(__file__).parent, check=True)
    assert probed.content(pool) == whole
