"""Build wheel and sdist, look what is in them, and try the wheel with torch and safetensors alone.

    python benchmarks/wheel.py                          # `make wheel`
    python benchmarks/wheel.py python3.10 python3.13    # `make pythons`: with these interpreters

The first trial runs in an environment of its own in which only torch, safetensors and what these
need can be imported, lent by this one: train, shrink, search, save, load, export as plain tensors.
The others run where pip installs the wheel and its program, and train the digits too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
OURS = ("src/", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore")
SMOKE = """
import sys, torch, maestro_lod as lod
from torch import nn
model = lod.decompose(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
x, y = torch.randn(32, 16), torch.randint(4, (32,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = lod.Elastic(model, optimizer, sizes=[0.6])
lod.fit(model, [(x, y)] * 4, optimizer=optimizer, method=train, epochs=4)
sizes = lod.frontier(model, lambda m: nn.functional.cross_entropy(m(x), y), example=x[:1])
lod.save(model, "m.safetensors")
lod.load("m.safetensors", into=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
lod.deploy_size(model, sizes, "out", example=x[:1], formats=["safetensors", "pt2"], max_params=0.9)
extra = {"typer", "rich", "pydantic", "yaml", "sklearn", "onnx", "datasets"} & set(sys.modules)
assert not extra, extra
print("the wheel works:", lod.__version__, lod.__file__)
"""
WITH = """
import platform, torch
print("and its program too, with Python", platform.python_version(), "and torch", torch.__version__)
"""
TYPED = """
import torch
from torch import nn
import maestro_lod as lod
model: nn.Module = lod.decompose(nn.Linear(4, 4))
ranks: dict[str, int] = lod.ranks(model)
sizes = lod.frontier(model, lambda m: float(m(torch.ones(1, 4)).sum()))
reveal_type(sizes.pick(max_params=0.5))
"""


def build() -> tuple[Path, Path]:
    """Build both and return their paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    return next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))


def require_contents(wheel: Path, sdist: Path) -> None:
    """Refuse leftovers, and files that are missing."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    strange = [n for n in names if not n.startswith("maestro_lod") or "__pycache__" in n]
    present = {path.relative_to(ROOT / "src").as_posix() for path in _sources()}
    missing = present - {*names}
    with tarfile.open(sdist) as packed:
        inside = [n.partition("/")[2] for n in packed.getnames()]
    strange += [n for n in inside if n and not n.startswith(OURS)]
    if strange or missing:
        sys.exit(f"leftovers: {strange[:9]}; missing: {sorted(missing)[:9]}")
    print(f"{len(names)} files in the wheel, {len(inside)} in the sdist")


def _sources() -> list[Path]:
    found = (ROOT / "src" / "maestro_lod").rglob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def try_alone(wheel: Path) -> None:
    """Install the wheel into an environment that has what it asks for alone, and use it there."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(f"{place}/env", with_pip=False)
        python = f"{place}/env/bin/python"
        packages = next(Path(place, "env").glob("lib/python*/site-packages"))
        for name in needed("torch") | needed("safetensors[torch]"):
            _lend(name, packages)
        install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
        subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
        subprocess.run([python, "-c", SMOKE], check=True, cwd=place)
        (Path(place) / "user.py").write_text(TYPED)
        types = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py"]
        said = subprocess.run(types, cwd=place, capture_output=True, text=True, check=False).stdout
        if said.count("dict[str, int]") != 1 or "error" in said:
            sys.exit(f"py.typed does not reach a user: {said}")
        print("a user's file is checked by our types")


def try_with(wheel: Path, interpreter: str) -> None:
    """Install the wheel and its program for another Python, and use both there."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([interpreter, "-m", "venv", f"{place}/env"], check=True)
        python = f"{place}/env/bin/python"
        pins = ["--constraint", ROOT / "constraints.txt", f"{wheel}[cli]"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
        # isolated, so that nothing but the wheel is found
        subprocess.run([python, "-I", "-c", SMOKE], check=True, cwd=place)
        train = ["train", "digits", "--set", "epochs=2", "--set", "data.limit=200", "--quiet"]
        subprocess.run([python, "-I", "-m", "maestro_lod", *train], check=True, cwd=place)
        subprocess.run([python, "-I", "-c", WITH], check=True)


def needed(asked: str) -> set[str]:
    """Return the packages that one asks for, itself and what those ask for included."""
    found: set[str] = set()
    waiting = [Requirement(asked)]
    while waiting:
        one = waiting.pop()
        if str(one) not in found:
            found.add(str(one))
            others = map(Requirement, metadata.requires(one.name) or ())
            waiting += [other for other in others if _applies(other, one.extras)]
    return {Requirement(text).name for text in found}


def _applies(other: Requirement, extras: set[str]) -> bool:
    """Return True if a requirement of a package applies here, with these extras."""
    return other.marker is None or any(
        other.marker.evaluate({"extra": extra}) for extra in extras or {""}
    )


def _lend(name: str, packages: Path) -> None:
    """Let an environment have a package of this one, which is large, as a link."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


if __name__ == "__main__":
    made = build()
    require_contents(*made)
    if not sys.argv[1:]:
        try_alone(made[0])
    for interpreter in sys.argv[1:]:
        try_with(made[0], interpreter)
