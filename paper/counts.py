"""Counts of all models and baselines that follow from arithmetic, compared with the paper's.

Nothing is trained or computed: models are built on the meta device and counted there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from maestro_lod import RankSampler, summary
from maestro_lod.cli.registry import MODELS
from maestro_lod.model.cost import Summary, count_params
from maestro_lod.model.inputs import Example
from maestro_lod.model.structure import restructure, uninitialized
from maestro_lod.model.survey import Plan
from maestro_lod.train.ledger import Ledger
from paper.published import (
    COUNTS,
    DISAGREEMENTS,
    LENET,
    LENET_PARAMS_SHARE,
    MAESTRO_PARAMS,
    TRANSFORMER,
)
from paper.scale import Scale

TITLE = "Counts: what follows from arithmetic"

TOKENS = 28
"""Source and target tokens at which the paper counts the MACs of its Transformer."""

UNITS = {"": 1.0, "M": 1e6, "G": 1e9, "×": 1.0, "%": 0.01}


@dataclass(frozen=True)
class Count:
    """One count, and its printed values in the paper by place."""

    what: str
    quantity: str
    ours: float
    """Value; whole numbers are exact, others as exact as the numbers that they follow from."""
    printed: Mapping[str, str] = field(default_factory=dict)


def measure(scale: Scale) -> dict[str, Any]:
    """Count everything; the same at any scale."""
    with torch.device("meta"):
        counts = [*models(), *pufferfish(), *others(), *lenet_rows(), *transformer_rows()]
    rows: list[dict[str, Any]] = []
    for count in counts:
        # the order of a sum shows in the last digits of a ratio, so they are not kept
        ours = count.ours if isinstance(count.ours, int) else float(f"{count.ours:.9g}")
        row = {"what": count.what, "quantity": count.quantity, "ours": ours}
        printed = count.printed or COUNTS.get((count.what, count.quantity), {})
        for where, text in printed.items():
            same = agrees(text, count.ours)
            why = DISAGREEMENTS.get((count.what, count.quantity, where), "no")
            verdict = "yes" if same else why
            rows.append({**row, "where": where, "paper": text, "agrees": verdict})
        if not printed:
            rows.append({**row, "where": None, "paper": None, "agrees": None})
    return {"rows": rows}


def figures(result: dict[str, Any]) -> dict[str, str]:
    return {}


def markdown(result: dict[str, Any]) -> str:
    lines = ["| what | quantity | paper | ours | agrees |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        paper = "–" if row["paper"] is None else f"{row['paper']} ({row['where']})"
        verdict = "–" if row["agrees"] is None else row["agrees"]
        ours = written(row["ours"])
        lines.append(f"| {row['what']} | {row['quantity']} | {paper} | {ours} | {verdict} |")
    return "\n".join(
        [
            f"{judgement(result)} *MACs* are multiply-accumulates with weights, for one image or "
            f"for {TOKENS} source and target tokens; *training* is the mean cost of a step without "
            "a penalty, relative to dense training, the params those held in memory and the MACs "
            "those expected when one (layer, rank) is drawn. Not here: Cuttlefish, IMP and "
            "RareGems, whose sizes come out of their training.",
            "",
            *lines,
        ]
    )


def judgement(result: dict[str, Any]) -> str:
    kinds = Counter(row["agrees"].partition(":")[0] for row in result["rows"] if row["paper"])
    others = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if kind not in ("yes", "no"))
    return (
        f"{kinds['yes']} of {kinds.total()} comparisons with a number of the paper agree to its "
        f"last digit; the others by kind: {others}; without a reason: {kinds['no']}."
    )


def written(value: float) -> str:
    """Return a count as text: exact ones with all digits, others with significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value < 1000:
        return f"{value:.4f} ×"
    return f"{value / 1e6:.3f} M" if value > 1e5 else f"about {value:,.0f}"


def parsed(text: str) -> tuple[float, float]:
    """Return the value of a printed number, and half of its last digit."""
    digits, _, unit = text.partition(" ")
    number = Decimal(digits)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return float(number) * UNITS[unit], 10.0**exponent / 2 * UNITS[unit]


def agrees(text: str, ours: float) -> bool:
    """Return True if a count equals the printed value within its digits."""
    value, half = parsed(text)
    return abs(value - ours) <= half * (1 + 1e-9)


# -- the models --------------------------------------------------------------------------------


def example(name: str) -> Example:
    """Return an input of a model of `MODELS`: one image, or one pair of sentences."""
    if name == "transformer":
        sentence = torch.ones(1, TOKENS, dtype=torch.int64)
        return sentence, sentence
    channels, pixels = {"lenet": (1, 28), "resnet50": (3, 224)}.get(name, (3, 32))
    return torch.empty(1, channels, pixels, pixels)


def low_rank(model: nn.Module, **choice: Any) -> nn.Module:
    """Decompose a model on the meta device, where weights have no values."""
    options = {"only": None, "skip": None, "ranks": None, "tied": "keep", **choice}
    return restructure(model, Plan(model, **options).structure(), fill=uninitialized)


def both(what: str, found: Summary[int]) -> Iterator[Count]:
    yield Count(what, "params", found.params)
    yield Count(what, "MACs", found.macs)


def models() -> Iterator[Count]:
    """Return the models by name."""
    yield from counted("LeNet", "lenet")

    yield from counted("ResNet-18", "resnet18")
    stem: Any = MODELS["resnet18"]()
    stem.stem[0] = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    yield Count("ResNet-18 with a 7×7 stem", "params", count_params(stem))

    yield from counted("VGG-19", "vgg19")
    yield from both("VGG-19 with two more linear layers", summary(vgg19_wide(), example("vgg19")))

    yield from counted("ResNet-50", "resnet50")
    resnet, image = MODELS["resnet50"](), example("resnet50")
    macs = summary(resnet, image).macs + norm_and_relu(resnet, image)
    yield Count("ResNet-50", "MACs, batch norm and ReLU too", macs)

    tied, sentences = MODELS["transformer"](tie_output=True), example("transformer")
    yield from both("Transformer, tied output", summary(tied, sentences))
    yield from counted("Transformer", "transformer", skip="embedding")
    full = summary(low_rank(MODELS["transformer"](), skip="embedding"), sentences)
    yield Count("Transformer", "training MACs, nothing drawn", full.macs / full.dense_macs)


def counted(what: str, name: str, skip: str | None = None) -> Iterator[Count]:
    """Return the counts of a dense model and of its training, decomposed without a penalty."""
    x = example(name)
    yield from both(what, summary(MODELS[name](), x))
    model = low_rank(MODELS[name](), skip=skip)
    ledger = Ledger.open_for(model, x)
    ledger.epochs.append(ledger.epoch_cost(model, RankSampler(model).chances()))
    assert ledger.relative_params is not None and ledger.relative_macs is not None
    yield Count(what, "training params", ledger.relative_params)
    yield Count(what, "training MACs", ledger.relative_macs)


def vgg19_wide() -> nn.Module:
    """Build the VGG-19 of Pufferfish: two hidden linear layers before the last one."""
    model: Any = MODELS["vgg19"]()
    hidden = nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
    model.fc = nn.Sequential(*hidden, model.fc)
    return cast(nn.Module, model)


class _Outputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that operations give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        self.elements[func.overloadpacket.__name__] += first.numel()
        return result


@torch.no_grad()
def norm_and_relu(model: nn.Module, x: Example) -> int:
    """Count two FLOPs per output of batch norm and one per output of ReLU."""
    outputs = _Outputs()
    with outputs:
        model.eval()(x)
    return 2 * outputs.elements["native_batch_norm"] + outputs.elements["relu"]


# -- the baselines -----------------------------------------------------------------------------


def pufferfish() -> Iterator[Count]:
    """Count models at a quarter of the full rank in the layers that Pufferfish chooses."""
    skip = ["stem", "layer1.0", "*.shortcut", "fc"]
    found = summary(low_rank(MODELS["resnet18"](), skip=skip, ranks=0.25), example("resnet18"))
    yield from both("Pufferfish ResNet-18", found)

    wide = vgg19_wide()
    convolutions = [n for n, module in wide.named_modules() if isinstance(module, nn.Conv2d)]
    skip = [*convolutions[:9], "fc.4"]
    vgg = summary(low_rank(wide, skip=skip, ranks=0.25), example("vgg19"))
    yield from both("Pufferfish VGG-19", vgg)

    x = example("resnet50")
    hybrid = low_rank(strided_late(4), only="layer4", skip="*.shortcut", ranks=0.25)
    yield from both("Pufferfish ResNet-50", summary(hybrid, x))
    most = low_rank(strided_late(2, 3, 4), skip=["stem", "layer1", "*.shortcut", "fc"], ranks=0.25)
    resnet50 = summary(most, x)
    yield from both("Pufferfish ResNet-50, but stem, stage 1 and classifier", resnet50)
    everything = summary(low_rank(MODELS["resnet50"](), ranks=0.25), x)
    yield Count("Pufferfish ResNet-50, all layers", "params", everything.params)

    tied = MODELS["transformer"](tie_output=True)
    halves = low_rank(tied, skip=["encoder.0", "decoder.0"], ranks=0.25)
    transformer = summary(halves, example("transformer"))
    yield from both("Pufferfish Transformer", transformer)

    relative = "Maestro {}, relative to Pufferfish".format
    size, _ = parsed(MAESTRO_PARAMS["VGG-19, λ = 32e-6"])
    yield Count(relative("VGG-19, λ = 32e-6"), "params", size / vgg.params)
    macs, size = (parsed(text)[0] for text in TRANSFORMER["2.56"])
    yield Count(relative("Transformer, λ = 2.56"), "params", size / transformer.params)
    yield Count(relative("Transformer, λ = 2.56"), "MACs", macs / transformer.macs)
    size, _ = parsed(MAESTRO_PARAMS["ResNet-50, all layers"])
    yield Count(relative("ResNet-50, all layers"), "params", size / resnet50.params)


def strided_late(*stages: int) -> nn.Module:
    """Return ResNet-50 whose factored shortcuts stride in the second factor, as in Pufferfish."""
    model = MODELS["resnet50"]()
    for stage in stages:
        shortcut: Any = model.get_submodule(f"layer{stage}.0.shortcut")
        dense = shortcut[0]
        rank = min(dense.in_channels, dense.out_channels) // 4
        shortcut[0] = nn.Sequential(
            nn.Conv2d(dense.in_channels, rank, 1, bias=False),
            nn.Conv2d(rank, dense.out_channels, 1, dense.stride, bias=False),
        )
    return model


def others() -> Iterator[Count]:
    """Count XNOR-Net and spectral initialization."""
    builds: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18": MODELS["resnet18"],
        "VGG-19": vgg19_wide,
    }
    for name, build in builds.items():
        found = summary(build(), example("resnet18"))
        yield Count(f"XNOR-Net {name}", "params / 32", found.params / 32)
        # the first and the last layer keep their weights, every binary row has a scale
        binary = [row for row in found.layers if row.kind in ("Conv2d", "Linear")][1:-1]
        bits = sum(math.prod(row.shape) for row in binary)
        scales = sum(row.shape[0] for row in binary)
        stored = found.params - bits + bits / 32 + scales
        yield Count(f"XNOR-Net {name}", "params, binary ones / 32", stored)
    dense = MODELS["vgg19"]()
    factored = spectral(0.02 * count_params(dense))
    yield from both("Spectral init VGG-19, 2 % of dense", summary(factored, example("vgg19")))


def spectral(budget: float) -> nn.Module:
    """Build VGG-19 for spectral initialization: convolutions as 1×3, then 3×1, except the first.

    One share ρ of out · 3 is the rank of all of them, the largest that fits the budget.
    """
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        share = (low + high) / 2
        fits = count_params(_spectral(share)) <= budget
        low, high = (share, high) if fits else (low, share)
    return _spectral(low)


def _spectral(share: float) -> nn.Module:
    model = MODELS["vgg19"]()
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    for name in convolutions[1:]:
        dense: Any = model.get_submodule(name)
        rank = max(1, round(share * dense.out_channels * 3))
        pair = nn.Sequential(
            nn.Conv2d(dense.in_channels, rank, (1, 3), padding=(0, 1), bias=False),
            nn.Conv2d(rank, dense.out_channels, (3, 1), padding=(1, 0), bias=False),
        )
        model.set_submodule(name, pair)
    return model


# -- rows that fix each other ------------------------------------------------------------------


def lenet_rows() -> Iterator[Count]:
    """Count rows of Table 10 in which only linear layers are smaller, so MACs fix parameters."""
    found = summary(MODELS["lenet"](), example("lenet"))
    for name in ("8e-5", "16e-5"):
        params = found.params - (found.macs - LENET[name][2])
        printed = {"Table 10": str(LENET[name][3])}
        yield Count(f"LeNet, λ = {name}", "params, from its MACs", params, printed)
        printed = {"Table 10": LENET_PARAMS_SHARE[name]}
        yield Count(
            f"LeNet, λ = {name}", "params relative to dense", params / found.params, printed
        )
    share = LENET_PARAMS_SHARE["32e-5"]
    about = parsed(share)[0] * found.params
    printed = {"Table 10": str(LENET["32e-5"][3])}
    yield Count("LeNet, λ = 32e-5", f"params, from its {share}", about, printed)


def transformer_rows() -> Iterator[Count]:
    """Count rows of Table 13, where each weight of linear layers is used once per token."""
    model = MODELS["transformer"]()
    found = summary(model, example("transformer"))
    assert isinstance(model.embedding, nn.Embedding)
    embedding = model.embedding.weight.numel()
    rest = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    for name, (macs, params) in TRANSFORMER.items():
        what = f"Transformer, λ = {name}"
        size = embedding + parsed(macs)[0] / TOKENS + rest
        yield Count(what, f"params, from its {macs}MACs", size, {"Table 13": params})
    least, _ = parsed(TRANSFORMER["5.12"][0])
    yield Count(
        "Transformer, λ = 5.12", "MACs relative to dense", least / found.macs, {"Table 13": "0.9 ×"}
    )
