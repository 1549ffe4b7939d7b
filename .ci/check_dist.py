"""Check that what `make dist` built works in an empty environment: python .ci/check_dist.py [FOLDER]

In an empty environment: the wheels of fabricate-trainer and of every plugin are installed with what they require, the README's example
runs in one process and in two, `fabricate plugins` lists every plugin that has a name, and each can be imported. Then the same from the
source distributions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHIVES = {"wheels": "*.whl", "source distributions": "*.tar.gz"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; its failure is the end."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def check(archives: list[Path], python: Path, folder: Path) -> None:
    """Install `archives`, run the README's example with them, and look for the plugins."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *archives, cwd=folder)
    run(
        *pip, "--no-deps", "--force-reinstall", *archives, cwd=folder
    )  # not what the archives before them had installed
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    (folder / "line.py").write_text(example[1], encoding="utf-8")
    command = python.with_name("fabricate")
    for line in (run(python, "line.py", cwd=folder), run(command, "run", "line.py", "--nproc", "2", cwd=folder)):
        found = re.search(r"200 steps, loss (\S+)", line)
        assert found is not None, line
        assert float(found[1]) < 1e-6, line
    plugins = run(command, "plugins", cwd=folder)
    for project in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        name = project.parent.name
        if "entry-points.fabricate" in project.read_text(encoding="utf-8"):
            assert name in plugins, f"{name} is not in:\n{plugins}"
        run(python, "-c", f"import {name.replace('-', '_')}", cwd=folder)


def main() -> None:
    """Check both kinds of archives."""
    built = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", torch[0])  # first: nothing replaces it then
        for kind, pattern in ARCHIVES.items():
            archives = sorted(built.glob(pattern))
            assert archives, f"no {kind} in {built}; run make dist first"
            check(archives, python, folder)
            print(f"{kind}: {len(archives)} installed, the README's example ran, the plugins too", flush=True)


if __name__ == "__main__":
    main()
