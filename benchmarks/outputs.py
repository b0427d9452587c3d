"""Run every command of `lod` in a pipe and write what it says into docs/output.md.

    python benchmarks/outputs.py

The commands are small ones, one after the other in one folder, on one thread. Times in them are
those of the machine that wrote the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "output.md"
START, END = "<!-- benchmarks/outputs.py -->\n", "<!-- end -->\n"
_PROGRESS = re.compile(r"(searching sizes|decompose|deploy|measuring): ")
DEMO = "lod demo --out demo"
FEW = "--set epochs=4 --set optimizer=adam --set optimizer.lr=0.003 --set threads=1"
COMMANDS = (
    "lod --version",
    "lod recipes",
    f"lod train digits {FEW}",
    f"lod train digits --set method=dense {FEW} --out runs/dense --quiet",
    "lod resume runs/digits",
    "lod summary runs/digits",
    "lod frontier runs/digits",
    "lod deploy runs/digits --max-params 15% --to onnx --to safetensors --int8 --out phone",
    "lod bench runs/digits --reference runs/dense",
    "lod report runs/digits runs/dense",
    "lod verify runs/digits",
    "lod compare digits --methods lod,narrow --sizes 0.25 --lr-trials 1 --set epochs=12",
    f"lod tune digits --max-params 20000 --min-accuracy 0.5 --largest 2 --set proximal=true {FEW}",
    "lod compress llama --data texts.txt --max-params 80% --batches 2 --out small",
    "lod distill small --teacher llama --data texts.txt --steps 4 --batches 2 --out distilled",
    "lod train digts",
    DEMO,
)
HEAD = """# Output of every command

This page shows the output of each command in a pipe: plain lines without colours, independent of
the width of the terminal. A terminal shows bars and colours instead of progress lines. Progress
goes to standard error and results to standard output; errors are one line. The page is written by
`python benchmarks/outputs.py`.
"""


def said(command: str, place: Path) -> str:
    """Return what a command writes to both streams of a pipe, and its exit code if it is not 0."""
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "maestro_lod", *arguments], cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, env=_environment(place),
    )  # fmt: skip
    code = f"\n(exit code {done.returncode})" if done.returncode else ""
    return re.sub(r"[ \t]+$", "", done.stdout, flags=re.MULTILINE).strip("\n") + code


def _environment(place: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "LOD_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"PYTHONUNBUFFERED": "1"}


def show_demo(text: str) -> None:
    """Write what the demo says about deployed sizes into the README and the quickstart."""
    lines = text[text.index("$ lod deploy") :].splitlines()
    said = [line for line in lines if not _PROGRESS.match(line)]
    block = "\n".join(["```text", *said, "```", ""])
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        head, rest = page.read_text().split(START)
        page.write_text(head + START + block + END + rest.split(END, 1)[1])


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.support.directories import write_llama

    parts = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_llama(place / "llama")
        (place / "texts.txt").write_text("the cat sat on a mat and the dog ran far away\n" * 200)
        for command in COMMANDS:
            text = said(command, place).replace(str(ROOT), "/path/to/the/checkout")
            parts.append(f"```text\n$ {command}\n{text}\n```\n")
            if command == DEMO:
                show_demo(text)
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
