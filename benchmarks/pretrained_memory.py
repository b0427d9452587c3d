"""What memory and time does it take to calibrate a language model, and to decompose a large one?

    python benchmarks/pretrained_memory.py MODELS_DIR
    python benchmarks/pretrained_memory.py --billion

The first calibrates the language model of `pretrained_models.py` on 64 × 256 tokens. The second
makes a Llama of 1.1 billion random weights and decomposes it at a quarter of the rank, block after
block from the last one: what earlier blocks see is then still the original's. Memory is the peak of
the resident set above what was there before the model; MALLOC_MMAP_THRESHOLD_=65536 in the
environment makes the C library give freed memory back. Writes results/pretrained_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretrained_models import loader
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import maestro_lod as lod
from maestro_lod.sizes.calibration import calibrate

MB = 2**20
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "pretrained.md"
START, END = "<!-- benchmarks/pretrained_memory.py -->\n", "<!-- end of memory -->"
SEVEN_BILLION = {"width": 4096, "hidden": 11008, "blocks": 32}


def resident(line: str) -> float:
    """Return a line of this process's status, such as VmRSS or its peak VmHWM, in MB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{line}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(work: Callable[[], object], before: float) -> dict[str, float]:
    """Run work; returns its time, and the peak of the memory above what was there before."""
    forget_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return {
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.perf_counter() - wall, 1),
        "peak_mb": round(resident("VmHWM") - before, 1),
    }


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def calibration(folder: Path, count: int) -> dict[str, Any]:
    """Calibrate the language model by its inputs, a window at a time, 4 MB of moments in a pass."""
    load = loader(folder / "stories15m")
    windows = load.windows("calib")[:count]
    tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=2, vocab_size=16)  # fmt: skip
    calibrate(LlamaForCausalLM(tiny), [{"input_ids": torch.ones(1, 4, dtype=torch.int64)}])
    before = resident("VmRSS")
    model = load.load()
    size = bytes_of(model) / MB
    batches = [{"input_ids": window[None], "logits_to_keep": 1} for window in windows]
    largest = max(m.in_features for n, m in model.named_modules()
                  if isinstance(m, nn.Linear) and n != "lm_head")  # fmt: skip
    limit = 1.5 * size + 8 * largest**2 / MB
    found = measured(lambda: calibrate(model, batches, memory=6 * MB), before)
    return {"model_mb": round(size, 1), "limit_mb": round(limit, 1), "windows": count, **found}


def billion(done: int) -> dict[str, Any]:
    """Decompose some blocks of a Llama of 1.1 billion random weights, at a quarter of the rank.

    All blocks are alike, and the first one that is decomposed finds the most memory in use.
    """
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip
    before = resident("VmRSS")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    size, params = bytes_of(model), sum(p.numel() for p in model.parameters())
    batches = [{"input_ids": torch.randint(0, 32000, (2, 64)), "logits_to_keep": 1}]

    blocks = config.num_hidden_layers

    def work() -> None:
        for number in reversed(range(blocks - done, blocks)):
            block = f"model.layers.{number}"
            seen = lod.calibrate(model, batches, only=block)
            lod.decompose(model, only=block, ranks=0.25, calibration=seen)
            print(f"block {number}, peak {resident('VmHWM'):.0f} MB", flush=True)

    found = measured(work, before)
    found["cpu_seconds"] = round(found["cpu_seconds"] * blocks / done, 1)
    return {
        "params": params, "model_mb": round(size / MB), "blocks": blocks, "done": done, **found,
        "seven_billion": extrapolated(found, 2048, 5632, blocks, size / MB),
    }  # fmt: skip


def extrapolated(
    found: dict[str, float], width: int, hidden: int, blocks: int, size: float
) -> dict[str, float]:
    """Estimate the same for 7 billion weights: time as the work on all matrices, cubic in sides."""

    def work(width: int, hidden: int, blocks: int) -> float:
        return blocks * (4 * width**3 + 3 * width**2 * hidden + width * hidden**2)

    large = SEVEN_BILLION
    more = work(large["width"], large["hidden"], large["blocks"]) / work(width, hidden, blocks)
    covariance = 8 * (large["hidden"] ** 2 - hidden**2) / MB
    return {
        "cpu_hours": round(found["cpu_seconds"] * more / 3600, 1),
        "peak_gb_float32": round((found["peak_mb"] - size + 4 * 6.74e9 / MB + covariance) / 1024),
        "peak_gb_bfloat16": round((found["peak_mb"] - size + 2 * 6.74e9 / MB + covariance) / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="?")
    parser.add_argument("--windows", type=int, default=64, help="Of 256 tokens, to calibrate on.")
    parser.add_argument("--billion", action="store_true")
    parser.add_argument("--blocks", type=int, default=22, help="How many of 22 are decomposed.")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    measured_now = {}
    if options.billion:
        measured_now["billion"] = billion(options.blocks)
    if options.models is not None:
        measured_now["calibration"] = calibration(options.models, options.windows)
    from interleaved import RESULTS, write  # not before: it keeps memory that was freed

    kept = RESULTS / "pretrained_memory.json"
    answer = json.loads(kept.read_text())["answer"] if kept.exists() else {}
    answer |= measured_now
    print(json.dumps(answer, indent=1))
    write("pretrained_memory", answer)
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(head + START + told(answer) + END + rest.split(END, 1)[1])


def told(answer: dict[str, Any]) -> str:
    """Say in sentences what was measured."""
    lines = []
    if of := answer.get("calibration"):
        lines.append(
            f"Calibrating a language model of {of['model_mb']:.0f} MB on {of['windows']} windows "
            f"of 256 tokens, one at a time: {of['cpu_seconds']:.0f} s of one core, at most "
            f"{of['peak_mb']:.0f} MB "
            f"with the model (1.5 times the model and the largest covariance: "
            f"{of['limit_mb']:.0f} MB)."
        )
    if of := answer.get("billion"):
        seven = of["seven_billion"]
        lines.append(
            f"{of['params']:,} random parameters ({of['model_mb']:,} MB) at a quarter of the rank: "
            f"{of['cpu_seconds'] / 60:.0f} minutes of one core ({of['done']} of {of['blocks']} "
            f"blocks were decomposed), at most {of['peak_mb']:,.0f} MB. "
            f"For 7 billion that makes about {seven['cpu_hours']} hours of one core, and "
            f"{seven['peak_gb_float32']} GB in float32 or {seven['peak_gb_bfloat16']} GB in "
            "bfloat16."
        )
    return "".join(f"\n{line}\n" for line in lines) + "\n"


if __name__ == "__main__":
    main()
