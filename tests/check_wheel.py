"""Build the wheel, check what is in it, and use an installed copy from another folder.

python tests/check_wheel.py
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"splice", "skeletons", "probes", "selector_training"}
WANTED = {
    "splice/py.typed",
    "skeletons/py.typed",
    "probes/py.typed",
    "selector_training/py.typed",
    "splice/prompts/agent_task.txt",
    "splice/prompts/compare_answers.txt",
    "splice/templates/result.html.j2",
    "skeletons/abstention/workflow.toml",
    "skeletons/multihop/parallel.toml",
    "skeletons/plancraft/host.toml",
    "skeletons/toolbench/judge.txt",
    *(
        f"skeletons/topologies/{path.name}"
        for path in (ROOT / "skeletons/topologies").glob("*.toml")
    ),
    "probes/templates/inspection.html.j2",
    "splice/shipped/card.json",
    "splice/shipped/README.md",
    "splice/ears/curation.py",
    "splice/sample/workflow.toml",
    "splice/sample/queries.jsonl",
    "splice/sample/documents/routes.txt",
}
USE = """
import pathlib, splice
assert "site-packages" in splice.__file__, splice.__file__
from splice import Agent, ScriptedModel, Workflow, repair
from splice.sample import write_sample
write_sample(pathlib.Path("sample"))
workflow = splice.load_workflow("sample/workflow.toml")
model = ScriptedModel(lambda request: "not found")
print(repair(workflow, "Where do I change planes?", model=model))
import skeletons
from splice.workload import find_loader, workload_names
assert len(skeletons.names()) == 9
assert [skeletons.load(name).name for name in skeletons.names()] == list(skeletons.names())
assert len(workload_names()) == 8
for name in workload_names():
    find_loader(name)
"""


def main() -> int:
    """Build, look, install, run; print one line at the end."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        n = check_contents(wheel)
        use_installed(wheel, Path(folder))
    print(f"wheel: {n} files, works from another folder")
    return 0


def build(folder: Path) -> Path:
    """The wheel, built from the source tree with the tools that are installed."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


def check_contents(wheel: Path) -> int:
    """Refuse a wheel with missing or foreign files; the number of files."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    foreign = {top for top in tops - PACKAGES if not top.endswith(".dist-info")}
    missing = WANTED - names
    unwanted = {name for name in names if name.endswith((".pyc", ".gguf")) or "/tests/" in name}
    if foreign or missing or unwanted:
        raise SystemExit(f"wheel: foreign {foreign}, missing {missing}, unwanted {unwanted}")
    return len(names)


def use_installed(wheel: Path, folder: Path) -> None:
    """Install the wheel into an environment that sees the dependencies, and use it elsewhere."""
    home = folder / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=folder)
    # The dependencies are those of this environment; what is tested is the wheel.
    here = next(path for path in sys.path if path.endswith("site-packages"))
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{here}\n", "utf-8")
    run(python, "-c", USE, cwd=folder)
    run(home / "bin" / "splice", "--version", cwd=folder)


def run(*command: object, cwd: Path) -> None:
    """Run a command and show its output only if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
