"""The other files of a transformers directory: tokenizer, processors, folders, and a model card.

Files are copied unchanged and never read by a library that could run them. Weights, pickled files
and code are left out: the weights are written again, pickles and code can run when they are read,
and the architecture is one of the installed transformers.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maestro_lod.errors import CheckpointError
from maestro_lod.files.json_files import read_json_file, read_limited
from maestro_lod.integrations.model_directory import weight_files
from maestro_lod.integrations.quantizer import shapes_in

CARD, SOURCE_CARD = "README.md", "README.source.md"
"""The model card that is generated, and the name under which the one of the source is kept."""

_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf", ".ggml", ".h5", ".msgpack",
    ".tflite", ".ot", ".xml", ".mlmodel", ".index.json", ".onnx_data",
)  # fmt: skip
_PICKLED = (".pkl", ".pickle", ".joblib", ".npy", ".npz", ".dill")
_PICKLE_STARTS = (*(b"\x80" + bytes([protocol]) for protocol in range(2, 6)), b"PK\x03\x04")
_CODE = (".py", ".pyc", ".ipynb", ".sh", ".bat", ".so", ".dll", ".dylib", ".exe", ".js")
_FOLDERS = "modules.json"  # of sentence-transformers
_KEPT = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
"""The entries that the card copies from the card of the source."""
_LARGEST_CARD = 2**20


def copy_companions(source: Path, directory: Path) -> dict[str, str]:
    """Copy all files that are not weights into the directory of a compressed model.

    Files that are there already are kept: the config is the compressed model's own.

    Args:
        source: The directory of the original model.
        directory: Where the compressed model was written.

    Returns:
        The files that were left out because of what they are, with the reason; weights aside.
    """
    left_out = {}
    modules = _module_folders(source)
    for name in _files_in(source):
        file, suffix = source / name, _suffix(name)
        target = directory / (SOURCE_CARD if name == CARD else name)
        is_module = suffix == ".safetensors" and name.rpartition("/")[0] in modules
        if (suffix in _WEIGHTS and not is_module) or target.exists():
            continue
        if reason := _reason_against(file, suffix, source):
            left_out[name] = reason
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return left_out


def _files_in(source: Path) -> Iterator[str]:
    """Yield the names of all files below a directory but hidden ones, in order."""
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(source).as_posix()


def _suffix(name: str) -> str:
    return next((end for end in _WEIGHTS if name.lower().endswith(end)), Path(name).suffix.lower())


def _module_folders(source: Path) -> set[str]:
    """Return the folders that sentence-transformers keeps modules with weights of their own in."""
    if not (source / _FOLDERS).is_file():
        return set()
    modules = read_json_file(source / _FOLDERS, [{"path": str}])
    return {module["path"].strip("/") for module in modules if module["path"].strip("/")}


def _reason_against(file: Path, suffix: str, source: Path) -> str:
    """Return why a file is not copied, '' for one that is."""
    inside = source.resolve()
    roots = [inside]
    if inside.parent.name == "snapshots":  # of a hub's cache
        roots.append(inside.parents[1] / "blobs")
    if not any(file.resolve().is_relative_to(root) for root in roots):
        return "a link out of the directory"
    if not stat.S_ISREG(file.stat().st_mode):
        return "not a regular file"
    if suffix in _CODE:
        return "code"
    with file.open("rb") as content:
        is_pickle = content.read(4).startswith(_PICKLE_STARTS)
    return "pickled" if is_pickle or suffix in _PICKLED else ""


# -- the model card ----------------------------------------------------------------------------


def write_model_card(
    directory: Path,
    source: Path,
    *,
    quality: Mapping[str, tuple[float, float]] | None = None,
    data: str = "",
) -> None:
    """Write the README.md of a compressed model.

    Args:
        directory: The directory of the compressed model, complete but for the card.
        source: The directory of the original model.
        quality: For each measure the original's value and the compressed model's.
        data: What `quality` was measured on.
    """
    taken = {key: value for key, value in _front_matter(source).items() if key in _KEPT}
    front = {
        "library_name": "transformers",
        **taken,
        "base_model": source.resolve().name,
        "tags": ["maestro-lod", "low-rank"],
    }
    yaml = importlib.import_module("yaml")  # transformers needs it too
    text = f"---\n{yaml.safe_dump(front, sort_keys=True)}---\n\n"
    text += _card(directory, source, quality or {}, data, str(taken.get("license", "")))
    (directory / CARD).write_text(text, encoding="utf-8")


def _front_matter(source: Path) -> dict[str, Any]:
    """Return the metadata of the source's model card; nothing if it has none that can be read."""
    yaml = importlib.import_module("yaml")
    try:
        text = read_limited(source / CARD, _LARGEST_CARD).decode()
        start, front, _ = text.split("---\n", 2)
        found = yaml.safe_load(front) if not start.strip() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _card(
    directory: Path,
    source: Path,
    quality: Mapping[str, tuple[float, float]],
    data: str,
    licence: str,
) -> str:
    name = source.resolve().name
    sizes = [
        ["parameters", *(f"{_count_params(where):,}" for where in (source, directory))],
        ["bytes of weights", *(f"{_count_bytes(where):,}" for where in (source, directory))],
    ]
    measured = [[what, *(f"{value:.4g}" for value in values)] for what, values in quality.items()]
    header = [["", name, "this model"], ["---", "--:", "--:"]]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in (*header, *sizes, *measured))
    where = f"Quality was measured on {data}." if quality else "Quality was not measured."
    file = (directory / "modeling_maestro_lod.py").is_file()
    trusting = (
        "Without that library, `trust_remote_code=True` loads it too, by the file "
        "`modeling_maestro_lod.py` in this directory.\n\n"
        if file
        else ""
    )
    terms = f"The licence is that of the source: {licence}." if licence else (
        "The source does not name a licence in its model card; its terms hold for this model too."
    )  # fmt: skip
    return f"""# {name}, compressed

{name} with low-rank layers: each has two thin factors instead of one weight. Compressed with
[maestro-lod](https://pypi.org/project/maestro-lod).

{rows}

{where}

## Load it

```python
import maestro_lod  # registers the format with transformers
from transformers import AutoModel  # or the automatic class of your task

model = AutoModel.from_pretrained("path/of/this/directory")
```

{trusting}A directory that any version of transformers loads, without this library and of the
original's size: `lod compress … --to dense`.

## Licence

{terms} Its model card is kept as `{SOURCE_CARD}` if it had one.
"""


def _count_params(directory: Path) -> int:
    files = [str(directory / name) for name in weight_files(directory)]
    return sum(math.prod(shape) for shape in shapes_in(files).values())


def _count_bytes(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in weight_files(directory))


def complete_directory(
    directory: Path,
    source: Path,
    *,
    quality: Mapping[str, tuple[float, float]] | None = None,
    data: str = "",
) -> dict[str, str]:
    """Make the directory of a compressed model complete: companions and a model card.

    Args:
        directory: Where the compressed model was written.
        source: The directory of the original model.
        quality: For each measure the original's value and the compressed model's.
        data: What `quality` was measured on.

    Returns:
        The files that were left out because of what they are, with the reason.

    Raises:
        CheckpointError: If a file cannot be read or written.
    """
    try:
        left_out = copy_companions(source, directory)
        write_model_card(directory, source, quality=quality, data=data)
    except OSError as error:
        raise CheckpointError(f"cannot complete {directory} from {source} ({error}).") from error
    return left_out
