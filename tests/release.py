"""The checks of a release: sdist and wheel are built, looked at, and used in an empty environment.

    python -m tests.release FOLDER            what the wheel needs is taken from this environment
    python -m tests.release FOLDER --whole    pip installs all of it, as for a user: torch too

It ends with exit code 1 at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
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

NOT_CODE = ("tutti/py.typed", "tutti/reports/page.html", "tutti/batch_last/kernels.c")
"""The files of the package that are no Python."""

MOST_BYTES = 2_000_000
"""A larger wheel holds something that nobody meant."""

MOST_IMPORT_S = 0.1
"""The CPU seconds that `import tutti` may take."""

IMPORTS = """
import sys, time
begin = time.process_time()
import tutti
seconds = time.process_time() - begin
heavy = [name for name in ("torch", "mpi4py", "numpy", "rich") if name in sys.modules]
print(seconds, *heavy)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a program and return what it prints; its failure is ours."""
    print("$", *(str(word).strip().partition("\n")[0] for word in command), flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build the sdist, and of that the wheel; return the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(Path(sys.executable).with_name("check-wheel-contents"), wheel)
    return wheel


def look_into(wheel: Path) -> None:
    """Compare the files of the wheel with those of the package."""
    sources = ROOT / "src"
    wanted = {str(path.relative_to(sources)) for path in (sources / "tutti").rglob("*.py")} | {*NOT_CODE}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    for what, names in (("misses", wanted - found), ("should not have", found - wanted)):
        if names:
            sys.exit(f"{wheel.name} {what} {', '.join(sorted(names)[:10])}")
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 1e3:,.0f} kB, {len(found)} files")
    if size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {size:,} bytes, and at most {MOST_BYTES:,} are expected")


def use(wheel: Path, whole: bool) -> None:
    """Install the wheel into an empty environment; import it, and train there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=whole)
        programs = folder / "venv" / "bin"
        if whole:
            run(programs / "pip", "install", "--quiet", wheel)
        else:
            run(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", wheel)
            (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
            # An editable tutti there is not found by that: it would take the files beside it to be read.
            (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        version = wheel.name.split("-")[1]
        said = run(programs / "tutti", "--version", cwd=folder)
        if said != f"tutti {version}\n":
            sys.exit(f"the wheel of version {version} says '{said.strip()}'")
        # Other programs can only make it longer.
        imported = [run(programs / "python", "-c", IMPORTS, cwd=folder).split() for _ in range(5)]
        if any(len(words) > 1 for words in imported):
            sys.exit(f"import tutti imports {', '.join(imported[0][1:])}")
        seconds = min(float(words[0]) for words in imported)
        print(f"import tutti: {1e3 * seconds:.0f} ms of a core")
        if seconds > MOST_IMPORT_S:
            sys.exit(
                f"that is more than {1e3 * MOST_IMPORT_S:.0f} ms; see python -X importtime -c 'import tutti'"
            )
        print(
            run(programs / "tutti", "train", "mlp", "--epochs", "1", "-n", "1", cwd=folder).splitlines()[-1]
        )


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--whole", action="store_true")
    own = parser.parse_args()
    wheel = build(own.folder.resolve() / "dist")
    look_into(wheel)
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    use(wheel, own.whole)


if __name__ == "__main__":
    main()
