"""Findings of the second review that a program meets which imports the library."""

from __future__ import annotations

import copy
import inspect
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from findings_program import foreign, lost, wrong
from probes import SECOND, called, expect, of, probe, refuses, works
from torch import Tensor, nn
from torch.nn import functional as F

unseen = partial(probe, review=SECOND, kind="architectures that nobody had seen")

warnings.simplefilter("ignore")


def compress(model: nn.Module, data: Any, **options: Any) -> Any:
    return called(of("pretrained.compression.compress"), model, data, **options)


def distill(model: nn.Module, **options: Any) -> Any:
    function = of("pretrained.distillation.distill", "pretrained.healing.heal")
    return called(function, model, **options)


def given() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10)
    ).eval()
    return model, [torch.randn(64, 24) for _ in range(8)]


def low_rank() -> nn.Module:
    from maestro_lod import decompose

    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)))


@torch.no_grad()
def distance(model: nn.Module, teacher: nn.Module, data: list[Tensor]) -> float:
    x = torch.cat(data)
    return float((model(x) - teacher(x)).square().mean() / teacher(x).square().mean())


# -- 5 and 6: unfinished work of others, healing ---------------------------------------------------

CONTINUED = "pretrained/test_compression.py::test_unfinished_work_of_another_call_is_refused"


@wrong(5, "compressing goes on with unfinished work on another model", CONTINUED)
def _() -> None:
    model, data = given()
    compress(copy.deepcopy(model), data, max_params=0.5, resume=Path("kept"))
    model[0].weight.data.add_(0.1)
    refuses(lambda: compress(model, data, max_params=0.5, resume=Path("kept")))


@wrong(5, "compressing goes on with unfinished work on other data", CONTINUED)
def _() -> None:
    model, data = given()
    compress(copy.deepcopy(model), data, max_params=0.5, resume=Path("kept"))
    other = [x + 1 for x in data]
    refuses(lambda: compress(model, other, max_params=0.5, resume=Path("kept")))


def distilled_by(**changes: Any) -> None:
    teacher, data = given()
    model = copy.deepcopy(teacher)
    compress(model, data, max_params=0.5)
    common = {"teacher": teacher, "data": data, "steps": 50, "resume": Path("kept")}
    distill(copy.deepcopy(model), **common)
    refuses(lambda: distill(model, **common | changes))


UNFINISHED = "pretrained/test_distillation.py::test_unfinished_work_of_another_call_is_refused"


@wrong(5, "healing goes on with unfinished work by another teacher", UNFINISHED)
def _() -> None:
    other = given()[0]
    other[0].weight.data.add_(0.1)
    distilled_by(teacher=other)


@wrong(5, "healing goes on with unfinished work on other batches", UNFINISHED)
def _() -> None:
    distilled_by(data=[x + 1 for x in given()[1]])


@wrong(
    6,
    "healing makes a model worse",
    "pretrained/test_distillation.py::test_distillation_that_makes_it_worse_leaves_the_model_as_it_was",
)
def _() -> None:
    teacher, data = given()
    model = copy.deepcopy(teacher)
    compress(model, data, max_params=0.5)
    before = distance(model, teacher, data)
    distill(model, data=data, teacher=teacher, steps=30, lr=0.3)
    after = distance(model, teacher, data)
    expect(after <= before, f"its distance grows {after / before:.0f} times")


@wrong(
    8,
    "what `compress` prints is neither what is stored nor what is loaded",
    "pretrained/test_compression.py::test_what_is_said_is_in_the_file_and_in_what_is_loaded",
)
def _() -> None:
    from maestro_lod import load, save

    model, data = given()
    fresh = copy.deepcopy(model)
    done = compress(model, data, max_params=0.9, correct=False)
    save(model, "model.safetensors")
    loaded = load("model.safetensors", into=fresh)
    found = sum(p.numel() for p in loaded.parameters())
    expect(found == done.params, f"{done.params:,} printed, {found:,} loaded")


# -- 9: federated updates --------------------------------------------------------------------------

UPDATES = "integrations/test_federated.py::test_values_that_a_model_cannot_hold_change_nothing"


def receive(model: nn.Module, state: Any) -> None:
    of("integrations.federated.receive", "federated.receive")(model, state)


def server() -> nn.Module:
    from maestro_lod import decompose

    torch.manual_seed(0)
    return decompose(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


def sent(**changes: Tensor) -> dict[str, Tensor]:
    return {**server().state_dict(), **{k.replace("_", ".", 1): v for k, v in changes.items()}}


@wrong(9, "`federated.receive` takes NaN, Inf and values that overflow", UPDATES)
def _() -> None:
    for value in (float("nan"), float("inf"), 1e39):
        state = sent(**{"0_u": torch.full((5, 5), value, dtype=torch.float64)})
        refuses(lambda state=state: receive(server(), state))


@wrong(9, "`federated.receive` takes complex values", UPDATES)
def _() -> None:
    refuses(lambda: receive(server(), sent(**{"0_u": torch.ones(5, 5, dtype=torch.complex64)})))


@wrong(9, "`federated.receive` leaves a model half changed", UPDATES)
def _() -> None:
    model = server()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value + 1 for key, value in before.items()}
    state["2.v"] = torch.ones(3, 3, 3)
    refuses(lambda: receive(model, state))
    after = model.state_dict()
    same = all(torch.equal(after[key], value) for key, value in before.items())
    expect(same, "half of it is changed")


@wrong(
    9,
    "`federated.aggregate` overflows on finite values and weights",
    "integrations/test_federated.py::test_means_by_extreme_weights_are_finite_and_within_the_values",
)
def _() -> None:
    from maestro_lod import MaestroError

    aggregate = of("integrations.federated.aggregate", "federated.aggregate")
    for weight in (1e308, 5e-324):
        model = server()
        with suppress(MaestroError):  # sums that no number holds may be refused
            aggregate(model, [(sent(), weight), (sent(), weight)])
        finite = all(value.isfinite().all() for value in model.state_dict().values())
        expect(finite, "it has values that are not finite")


@wrong(9, "`federated.aggregate` takes negative running variances", UPDATES)
def _() -> None:
    aggregate = of("integrations.federated.aggregate", "federated.aggregate")
    refuses(lambda: aggregate(server(), [(sent(**{"1_running_var": -torch.ones(5)}), 1.0)]))


# -- 11 and 12: choices ----------------------------------------------------------------------------


@wrong(
    11,
    "`lod compare` names the larger model as the winner of a tie",
    "baselines/test_compare_table.py::test_a_tie_goes_to_the_smaller_model",
)
def _() -> None:
    homes = ("baselines.compare.table", "app.compare.table")
    comparison, row = (of(*(f"{home}.{name}" for home in homes)) for name in ("Comparison", "Row"))

    def of_share(name: str, share: float) -> Any:
        return row(
            method=name,
            size=0.5,
            share=share,
            training=1.0,
            seconds=2.0,
            scores=(0.9,),
            runs=("a",),
            latency=share,
            params=100 * share,
            macs=share,
            bytes=share,
        )

    found = comparison(
        recipe="digits",
        metric="accuracy",
        split="test",
        epochs=3,
        seeds=1,
        budget=None,
        lr_trials=1,
        sizes=(0.5,),
        missing=(),
        trials={},
        paces={},
        dense={"params": 100.0, "macs": 1.0, "bytes": 1.0},
        rows=(of_share("large", 0.5), of_share("small", 0.2)),
    )
    expect(found.winners[0].row.method == "small", "large")


@wrong(
    12,
    "sizes are chosen by accuracies that differ by chance",
    "model/test_frontier_data.py::"
    "test_accuracies_that_differ_by_chance_do_not_choose_the_smallest_size",
)
def _() -> None:
    frontier = of("model.frontier.Frontier", "deploy.points.Frontier")
    point = of("model.limits.Size", "deploy.limits.Point")
    points = [
        point({"a": rank}, loss, accuracy, params=params, macs=None, bytes=40)
        for rank, loss, accuracy, params in (
            (8, 0.10, 0.9700, 50),
            (4, 0.14, 0.9694, 25),
            (1, 0.29, 0.9705, 5),
        )
    ]
    dense = point({}, 0.1, 0.97, params=100, macs=None, bytes=400)
    found = frontier(tuple(points), dense, "greedy", "params")
    chosen = {found.pick(max_params=limit)["a"] for limit in (0.5, 0.25, 0.1)}
    expect(len(chosen) == 3, "one model for three limits")


# -- 13 and 14: state that others see --------------------------------------------------------------


@wrong(
    13,
    "the first samples of the data reseed the global generator",
    "train/test_evaluate.py::"
    "test_first_samples_are_the_same_ones_and_leave_the_global_generator_as_it_was",
)
def _() -> None:
    first_samples = of("train.evaluate.first_samples", "train.sample.first_samples")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first_samples([(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))])
    torch.manual_seed(1)
    first_samples([(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))])
    expect(torch.equal(torch.get_rng_state(), before), "it is")


@wrong(
    13,
    "a copy taken inside a step keeps the ranks that were drawn",
    "train/test_lod.py::test_a_copy_taken_inside_a_step_runs_at_all_ranks",
)
def _() -> None:
    from maestro_lod import LoD

    model, x = low_rank(), torch.randn(3, 8)
    train, full = LoD(model, torch.optim.SGD(model.parameters(), 0.1)), model(x)
    for _ in range(8):
        with train.step():
            copied = copy.deepcopy(model)
            model(x).sum().backward()
        expect(torch.equal(copied(x), full), "it does")


@wrong(
    13,
    "an `AveragedModel` goes on averaging ranks that are others",
    "train/test_shrink.py::"
    "test_an_averaged_model_that_would_miss_a_shrink_is_refused_before_anything_changes",
)
def _() -> None:
    from maestro_lod import shrink

    model = low_rank()
    ema = torch.optim.swa_utils.AveragedModel(model)
    for layer in (model[0], model[2]):
        layer.u.data[:, 1:], layer.v.data[1:] = 0, 0
    refuses(lambda: shrink(model, threshold=1e-9))
    del ema


@wrong(
    13,
    "the importance of large factors is infinite",
    "train/test_penalty.py::test_importance_of_large_factors_is_finite_and_shrinks_nothing",
)
def _() -> None:
    from maestro_lod import decompose, importance

    model = decompose(nn.Linear(6, 6, bias=False))
    model.u.data.fill_(1e19)
    model.v.data.fill_(1e19)
    expect(bool(importance(model)[""].isfinite().all()), "inf")


@wrong(
    14,
    "threads get answers of each other's sizes",
    "layers/test_ranks.py::"
    "test_ten_thousand_answers_from_eight_threads_have_the_size_that_was_asked_for",
)
def _() -> None:
    from maestro_lod import at_ranks

    sys.setswitchinterval(1e-5)
    model, x, asked = low_rank(), torch.randn(2, 8), 8 * 150
    with torch.no_grad():
        wanted = []
        for rank in range(5):
            with at_ranks(model, rank):
                wanted.append(model(x))

    def answers(seed: int) -> int:
        count = 0
        with torch.no_grad():
            for number in range(asked // 8):
                rank = (seed + number) % 5
                with at_ranks(model, rank):
                    time.sleep(0)
                    count += not torch.equal(model(x), wanted[rank])
        return count

    with ThreadPoolExecutor(8) as threads:
        count = sum(threads.map(answers, range(8)))
    expect(count == 0, f"{count:,} of {asked:,}")


@wrong(
    14,
    "a model that is searched and summed up in several threads loses its forward",
    "sizes/test_frontier_search.py::"
    "test_one_model_is_searched_and_summed_up_in_several_threads_at_once",
)
def _() -> None:
    from maestro_lod import frontier, summary

    sys.setswitchinterval(1e-5)
    model, x = low_rank(), torch.randn(16, 8)

    def both(_: int) -> None:
        for _ in range(10):
            summary(model, x)
        frontier(model, lambda m: m(x).square().mean())

    def all_of_them() -> None:
        for _ in range(5):
            with ThreadPoolExecutor(6) as threads:
                list(threads.map(both, range(6)))

    works(all_of_them)


# -- 15: calibration -------------------------------------------------------------------------------


@lost(
    15,
    "a kill during calibration loses all of it",
    "sizes/test_calibration.py::test_a_killed_calibration_goes_on_batch_by_batch",
)
def _() -> None:
    calibrate = of("sizes.calibration.calibrate", "pretrained.calibration.calibrate")
    if "resume" in inspect.signature(calibrate).parameters:
        options = {"resume": Path("kept")}
    else:
        options = {"kept": of("pretrained.kept.Kept")(Path("kept"), {})}
    for name in ("_SAVED_EVERY", "_LEAST_WORK"):
        setattr(sys.modules[calibrate.__module__], name, 0)
    model, data = given()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))

    def loss(output: Tensor, target: object = None) -> Tensor:
        if len(calls) == 7:
            raise KeyboardInterrupt
        return output.square().sum()

    try:
        calibrate(model, data, loss=loss, **options)
    except KeyboardInterrupt:
        calls += [0]
    before = len(calls)
    calibrate(model, data, loss=loss, **options)
    again = len(calls) - before
    expect(again <= 2, f"{again} of 8 batches are done again")


# -- 19 to 21: messages, documentation, compiled code ----------------------------------------------

BUDGETS = "train.budget.Budget", "train.strength.Budget"


def on_budget(model: nn.Module, params: float) -> Any:
    """Return a training that ends with a share of the parameters."""
    import maestro_lod

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if hasattr(maestro_lod, "Elastic"):
        return maestro_lod.Elastic(model, optimizer, sizes=[params])
    return maestro_lod.LoD(model, optimizer, penalty=of(*BUDGETS)(params=params))


@foreign(
    19,
    "a frozen layer reads as a budget that is too small",
    "train/test_budget.py::test_frozen_layers_are_named_where_they_keep_a_budget_from_being_met",
)
def _() -> None:
    from maestro_lod import MaestroError

    model = low_rank()
    model[0].requires_grad_(False)
    try:
        on_budget(model, 0.2)
    except MaestroError as error:
        expect("frozen" in str(error), "no word of it")


@foreign(
    19,
    "`Budget(params=25.0)` is 25 parameters",
    "train/test_budget.py::test_a_budget_that_cannot_be_met_is_refused",
)
def _() -> None:
    refuses(lambda: of(*BUDGETS)(params=25.0))


@foreign(
    19,
    '`Budget(params="25%")` is refused',
    "train/test_budget.py::test_a_budget_may_be_written_as_text",
)
def _() -> None:
    works(lambda: of(*BUDGETS)(params="25%"))


class WithLabels(nn.Module):
    """Returns its own loss where it gets labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        scores = self.fc(x)
        return SimpleNamespace(loss=F.cross_entropy(scores, labels), logits=scores)


@foreign(
    19,
    "batches that are mappings end in a TypeError",
    "train/test_fit.py::test_batches_that_are_mappings_train_on_the_loss_of_the_output",
)
def _() -> None:
    from maestro_lod import fit

    model = WithLabels()
    batch = {"x": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 0])}
    works(lambda: fit(model, [batch], optimizer=torch.optim.SGD(model.parameters(), 0.1), epochs=1))


@foreign(
    19,
    "without an example nothing is summed up",
    "model/test_cost.py::test_without_an_example_all_but_macs_is_counted",
)
def _() -> None:
    from maestro_lod import summary

    works(lambda: str(summary(low_rank())))


@foreign(
    20,
    "a page says that DDP and FSDP are refused, another that they work",
    "docs/test_docs.py::test_no_page_says_that_live_wrappers_are_refused",
)
def _() -> None:
    import maestro_lod

    page = Path(str(maestro_lod.__file__)).parents[2] / "docs" / "layers.md"
    lines = [line for line in page.read_text().splitlines() if "DDP" in line and "live" in line]
    expect(not any("refused" in line for line in lines), "it does")


@foreign(
    20,
    "an example in a docstring calls `lod.round_ranks`, which is not there",
    "docs/test_docs.py::test_every_public_name_in_an_example_of_a_docstring_exists",
)
def _() -> None:
    import maestro_lod

    sources = Path(str(maestro_lod.__file__)).parent.rglob("*.py")
    named = any("lod.round_ranks(" in path.read_text() for path in sources)
    expect(not named or hasattr(maestro_lod, "round_ranks"), "it does")


@foreign(
    20,
    'a state of another budget: "this LoD a one"',
    "train/test_budget.py::test_a_state_of_another_method_is_refused_and_named",
)
def _() -> None:
    from maestro_lod import LoD, MaestroError

    model = low_rank()
    state = LoD(model, torch.optim.SGD(model.parameters(), 0.1)).state_dict()
    try:
        on_budget(model, 0.5).load_state_dict(state)
    except MaestroError as error:
        expect(" a one" not in str(error), "it says so")


@foreign(
    21,
    "`torch.compile(fullgraph=True)` fails from 2²² MACs on",
    "layers/test_compile.py::test_large_products_compile_into_one_graph",
)
def _() -> None:
    from maestro_lod import decompose

    model = decompose(nn.Linear(256, 256))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    works(lambda: compiled(torch.randn(256, 256)).sum().backward())


# -- 22 to 27: architectures -----------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def experts(family: str) -> tuple[Any, list[dict[str, Any]]]:
    import transformers

    torch.manual_seed(0)
    options = {
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
        },
        "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    }[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = [torch.randint(3, 64, (2, 12)) for _ in range(3)]
    return model, [{"input_ids": batch, "use_cache": False} for batch in ids]


def is_compressed(family: str) -> Callable[[], None]:
    def attempt() -> None:
        model, data = experts(family)
        works(lambda: compress(model, data, max_params=0.6))

    return attempt


for _family in ("Mixtral", "Qwen3Moe", "GptOss"):
    unseen(
        22,
        f"`compress` fails on stacked experts: {_family}",
        "layers/test_experts.py::test_it_is_compressed_extracted_saved_and_loaded",
    )(is_compressed(_family))


@unseen(
    22,
    "a second `decompose` of stacked experts silently does nothing",
    "layers/test_experts.py::test_a_second_call_decomposes_the_other_stack",
)
def _() -> None:
    from maestro_lod import decompose, ranks

    model, _ = experts("Mixtral")
    for stack in ("gate_up_proj", "down_proj"):
        decompose(model, only=f"*.experts.{stack}")
    found = ranks(model)
    expect(any(name.endswith("down_proj") for name in found), "down_proj stays dense")


@unseen(
    22,
    "a failure of `compress` leaves the model half decomposed",
    "pretrained/test_compression.py::test_a_failure_in_any_stage_leaves_the_model_as_it_was",
)
def _() -> None:
    model, data = given()

    def fail(*told: str | int) -> None:
        done, total = (each for each in told if isinstance(each, int))
        if "decomposing" in told and done == total:
            raise KeyboardInterrupt

    try:
        compress(model, data, max_params=0.5, on_progress=fail)
    except KeyboardInterrupt:
        expect(type(model[0]) is nn.Linear, "it is")


class ReadsByIndex(nn.Module):
    """Reads a dtype through an index, as Z-Image's embedding of time steps does."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x.to(self.mlp[0].weight.dtype))
        return y


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(12, 12), nn.Linear(12, 12)

    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.fc(x))
        return y


class CallsMethodOfChild(nn.Module):
    """Calls a child's method that reads a weight, as open_clip's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.to(self.inner.dtype()))
        return y


def is_extracted(model: nn.Module) -> None:
    from maestro_lod import decompose, extract

    decompose(model)
    works(lambda: extract(model, ranks=2)(torch.randn(3, 12)))


READ = (
    "model/test_survey.py::"
    "test_layers_whose_weights_are_read_through_containers_and_children_are_left_alone"
)


@unseen(23, "a weight that is read through an index breaks what `extract` returns", READ)
def _() -> None:
    is_extracted(ReadsByIndex())


@unseen(23, "a weight that a child's method reads breaks what `extract` returns", READ)
def _() -> None:
    is_extracted(CallsMethodOfChild())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = -x
        y: Tensor = self.rnn(x)[0]
        return y


@unseen(
    24,
    "a dense LSTM that really runs has no MACs",
    "model/test_cost.py::test_models_that_need_values_are_counted_on_the_example_itself",
)
def _() -> None:
    from maestro_lod import summary

    found = summary(Recurrent(), torch.ones(2, 5, 16)).macs
    expect(found == (by_hand := 2 * 5 * 4 * 32 * (16 + 32)), f"{found} of {by_hand}")


class RelativePositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.table = nn.Linear(8, 8), nn.Embedding(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        places = self.table(torch.arange(n)[:, None] - torch.arange(n) + 10)
        return torch.einsum("bnd,nmd->bnm", self.query(x), places)


@unseen(
    24,
    "products with positions that are looked up count as weights",
    "model/test_cost.py::test_products_with_positions_that_are_looked_up_do_not_count",
)
def _() -> None:
    from maestro_lod import summary

    found = summary(RelativePositions(), torch.ones(3, 7, 8)).macs
    expect(found == (by_hand := 3 * 7 * 8 * 8), f"{found} of {by_hand}")


@unseen(
    25,
    "`compress(healing=60)` makes tiny models worse",
    "pretrained/test_compression.py::test_distillation_never_makes_a_compressed_model_worse",
)
def _() -> None:
    worse = 0
    for seed in range(12):
        torch.manual_seed(seed)
        teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 10)).eval()
        data = [torch.randn(64, 24) for _ in range(8)]
        models = [copy.deepcopy(teacher) for _ in range(2)]
        for model, steps in zip(models, (0, 60), strict=True):
            compress(model, data, max_params=0.9, distill_steps=steps)
        plain, healed = (distance(model, teacher, data[-1:]) for model in models)
        worse += healed > plain * 1.001
    expect(worse == 0, f"{worse} of 12")


@unseen(
    26,
    "SGD that is too fast for layers of zeros ruins them without a word",
    "train/test_zero_ranks.py::"
    "test_a_learning_rate_that_is_too_large_for_factors_is_warned_of_before_sampling",
)
def _() -> None:
    from maestro_lod import LoD, decompose

    torch.manual_seed(0)
    first, head = nn.Linear(64, 64), nn.Linear(64, 10)
    nn.init.orthogonal_(first.weight, gain=1.6)
    nn.init.zeros_(head.weight)
    model = decompose(nn.Sequential(first, nn.ReLU(), head))
    train = LoD(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    x = torch.rand(64, 64)
    with train.step():
        F.cross_entropy(model(x), torch.arange(64) % 10).backward()
    train.optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train.end_epoch()
    expect(any("clip_norm" in str(each.message) for each in said), "no word")


@unseen(
    27,
    "exported experts have a fixed batch",
    "layers/test_experts.py::"
    "test_it_is_exported_as_one_graph_that_fits_any_batch_and_choice_of_experts",
)
def _() -> None:
    from maestro_lod import decompose, export, extract

    model, _ = experts("Mixtral")
    layer = extract(decompose(model, ranks=4)).model.layers[0].mlp.experts

    def call(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(rows, 32), torch.randint(0, 4, (rows, 2)), torch.rand(rows, 2)

    export(layer, "experts.pt2", example=call(2))
    program = torch.export.load("experts.pt2").module()
    works(lambda: [program(*call(rows)) for rows in (1, 3, 12)])


@unseen(
    27,
    "decomposing many layers takes time by the square of them",
    "model/test_surgery.py::test_twice_as_many_layers_are_twice_as_much_work",
)
def _() -> None:
    from maestro_lod import decompose

    def calls(count: int) -> int:
        made, model = 0, nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])

        def noted(*_: Any) -> None:
            nonlocal made
            made += 1

        sys.setprofile(noted)
        try:
            decompose(model, ranks=1)
        finally:
            sys.setprofile(None)
        return made

    few, some, many = map(calls, (200, 400, 800))
    growth = (many - some) / (some - few)
    expect(growth < 2.2, f"400 more layers cost {growth:.1f} times what 200 more do")
