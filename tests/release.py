"""The checks of a release: sdist and wheel are built, looked at, and used in an empty environment.

    python -m tests.release FOLDER            what the wheel needs is taken from this environment
    python -m tests.release FOLDER --whole    pip installs all of it, as for a user: torch too

It ends with exit code 1 at the first thing that is wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_CODE = {"tutti/py.typed", "tutti/reports/page.html", "tutti/batch_last/kernels.c"}
IMPORTS = "import sys, tutti; print(*({'torch', 'mpi4py', 'numpy', 'rich'} & set(sys.modules)))"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a program and return what it prints; its failure is ours."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build the sdist, and of that the wheel; return the wheel, which has all files of the package."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(Path(sys.executable).with_name("check-wheel-contents"), wheel)
    files = [path for kind in ("*.py", "*.toml") for path in (ROOT / "src/tutti").rglob(kind)]
    wanted = {str(path.relative_to(ROOT / "src")) for path in files} | NOT_CODE
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if wanted != found:
        sys.exit(f"{wheel.name} misses or should not have {', '.join(sorted(wanted ^ found)[:10])}")
    return wheel


def use(wheel: Path, whole: bool, folder: Path) -> None:
    """Install the wheel into an empty environment; import it, and train there."""
    venv.create(folder / "venv", with_pip=whole)
    programs = folder / "venv" / "bin"
    if whole:
        run(programs / "pip", "install", "--quiet", wheel)
    else:
        run(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", wheel)
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # An editable tutti there is not found by that: it would take the files beside it to be read.
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if run(programs / "tutti", "--version", cwd=folder) != f"tutti {wheel.name.split('-')[1]}\n":
        sys.exit("the wheel says that it has another version")
    if heavy := run(programs / "python", "-c", IMPORTS, cwd=folder).split():
        sys.exit(f"import tutti imports {', '.join(heavy)}")
    print(run(programs / "tutti", "train", "mlp", "--epochs", "1", "-n", "1", cwd=folder))


if __name__ == "__main__":
    made = build(Path(sys.argv[1]).resolve() / "dist")
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    with tempfile.TemporaryDirectory() as name:
        use(made, "--whole" in sys.argv, Path(name))
