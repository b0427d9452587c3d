"""Two processes in DistributedDataParallel: one process on the whole batch, through shrinks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from maestro_lod import LoD, MaestroError, decompose, ranks
from maestro_lod.layers.factors import RanksCutWarning

pytestmark = pytest.mark.multiprocess

EPOCHS, STEPS, BATCH = 5, 3, 8


def small_model(dtype: torch.dtype = torch.float64, *, zeros: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 4),
    )  # fmt: skip
    if zeros:
        nn.init.zeros_(model[6].weight)
    return decompose(model.to(dtype))


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 4, 4, generator=drawn, dtype=dtype)
    return x, torch.randint(4, (BATCH,), generator=drawn)


def share(x: Tensor) -> Tensor:
    """Return this process's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=5e-3),
}


def drop_last_rank(model: nn.Module, optimizer: optim.Optimizer, epoch: int) -> None:
    """Make one more rank of one layer useless, as the penalty would in a longer training."""
    layers = [m for m in model.modules() if hasattr(m, "u")]
    layer = layers[epoch % len(layers)]
    with torch.no_grad():
        layer.u[:, -1:] = 0.0
        layer.v[-1:] = 0.0


def trained(
    name: str, dtype: torch.dtype = torch.float64, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train, in as many processes as there are, and return what became of the model."""
    wraps, of_ddp = dist.is_initialized(), dict(options or {})
    keys = ("compiled", "loss", "ema", "accumulate", "zeros")
    use = {key: of_ddp.pop(key, None) for key in keys}
    accumulate = use["accumulate"] or 1
    model = inner = small_model(dtype, zeros=bool(use["zeros"]))
    if use["compiled"] == "inside":
        model = torch.compile(model, backend="eager")
    if wraps:
        model = ddp = DistributedDataParallel(model, **of_ddp)
    if use["compiled"] == "outside":
        model = torch.compile(model, backend="eager")
    optimizer = OPTIMIZERS[name](inner.parameters())
    if use["zeros"]:  # factors need a lower rate than the dense weights before
        optimizer.param_groups[0]["lr"] = 0.02
    ema = AveragedModel(inner) if use["ema"] else None
    train = LoD(model, optimizer, penalty=1e-3, seed=5, threshold=1e-4, ema=ema)
    lost, equal = [], []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            for part in range(accumulate):
                x, y = batch(100 * epoch + 10 * step + part, dtype)
                if wraps:
                    x, y = share(x), share(y)
                quiet = wraps and part + 1 < accumulate
                with ddp.no_sync() if quiet else contextlib.nullcontext(), train.step():
                    loss = F.cross_entropy(model(x), y) / accumulate
                    if use["loss"]:
                        loss = loss + train.penalty_loss() / accumulate
                    loss.backward()
            if not use["loss"]:
                train.add_penalty_gradients()
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update_parameters(inner)
        drop_last_rank(inner, optimizer, epoch)
        lost.append(train.end_epoch())
        equal.append(same_everywhere(inner) if wraps else True)
    state = {k: v.detach().clone() for k, v in inner.state_dict().items()}
    if ema is not None:
        state |= {f"ema.{k}": v.clone() for k, v in ema.module.state_dict().items()}
    return {"state": state, "lost": lost, "equal": equal, "ranks": ranks(model)}


def same_everywhere(model: nn.Module) -> bool:
    """Say whether the parameters of all processes are equal, bit for bit."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(everyone[0], other) for other in everyone)


def assert_as_one_process(
    results: list[dict[str, Any]], alone: dict[str, Any], within: float
) -> None:
    assert sum(bool(lost) for lost in alone["lost"]) >= 4
    for result in results:
        assert all(result["equal"])
        assert result["lost"] == alone["lost"] and result["ranks"] == alone["ranks"]
        for key, value in alone["state"].items():
            torch.testing.assert_close(result["state"][key], value, rtol=within, atol=within)


OPTIONS: dict[str, dict[str, Any]] = {
    "by gradients": {},
    "penalty in the loss": {"loss": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "small buckets, accumulated without sync": {"accumulate": 2, "bucket_cap_mb": 1},
    "averaged": {"ema": True},
    "head of zeros, the whole model first": {"zeros": True},
    "compiled inside": {"compiled": "inside"},
    "compiled outside": {"compiled": "outside"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_processes_train_what_one_does_on_the_whole_batch(pair, options):
    name = "adamw" if options.get("ema") or options.get("loss") or not options else "sgd"
    alone = trained(name, options={key: v for key, v in options.items() if key != "compiled"})
    assert_as_one_process(pair(trained, name, torch.float64, options), alone, 1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_processes_train_what_one_does_in_single_precision(pair, name):
    results = pair(trained, name, torch.float32)
    assert_as_one_process(results, trained(name, torch.float32), 1e-6)


# -- processes that do not go together -----------------------------------------------------------


def one_step(train: LoD, model: nn.Module, step: int = 0) -> None:
    x, y = batch(step)
    with train.step():
        F.cross_entropy(model(share(x)), share(y)).backward()
    train.optimizer.step()
    train.optimizer.zero_grad()


def message_of_disagreement(option: str, values: tuple[Any, Any]) -> str:
    model = small_model()
    ddp = DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train = LoD(ddp, optimizer, **{option: values[dist.get_rank()]})
    with pytest.raises(MaestroError) as caught:
        one_step(train, ddp)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        ("seed", (0, 1), "the ranks to sample"),
        ("threshold", (1e-7, 1e-3), "threshold=0.001"),
        ("sampling", ("pairs", "several"), "the ranks to sample"),
    ],
)
def test_processes_that_would_go_different_ways_are_refused_at_the_first_step(
    pair, option, values, said
):
    for message in pair(message_of_disagreement, option, values):
        assert said in message and "do not agree" in message and "process 1" in message


def message_of_other_draws() -> str:
    model = small_model()
    ddp = DistributedDataParallel(model)
    train = LoD(ddp, optim.SGD(model.parameters(), lr=0.1))
    one_step(train, ddp)
    if dist.get_rank() == 1:
        train.sampler.sample()
    one_step(train, ddp)
    with pytest.raises(MaestroError) as caught:
        train.end_epoch()
    return str(caught.value)


def test_a_process_that_draws_once_more_is_refused_at_the_end_of_the_epoch(pair):
    for message in pair(message_of_other_draws):
        assert "the ranks to sample" in message


def message_of_other_weights() -> str:
    model = small_model()
    ddp = DistributedDataParallel(model)
    train = LoD(ddp, optim.SGD(model.parameters(), lr=0.1))
    one_step(train, ddp)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[4].u.mul_(2)
    with pytest.raises(MaestroError) as caught:
        train.end_epoch()
    return str(caught.value)


def test_a_process_with_other_weights_is_refused_at_a_shrink(pair):
    for message in pair(message_of_other_weights):
        assert "process 1 has other weights than process 0: 4" in message


# -- the wrapper goes on -------------------------------------------------------------------------


def what_stays_of_a_wrapper() -> dict[str, Any]:
    model = small_model()
    ddp = DistributedDataParallel(nn.Sequential(model), gradient_as_bucket_view=True)
    seen: list[str] = []
    ddp.register_forward_hook(lambda *_: seen.append("forward"))
    ddp.mark = "mine"
    sent: list[int] = []

    def counted(_, bucket):  # torch asks for annotations that are no text, or none
        sent[-1] += bucket.buffer().numel()
        done = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return done.then(lambda result: result.value()[0])

    ddp.register_comm_hook(None, counted)
    ddp.train()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train = LoD(model, optimizer, seed=3)
    stored = []
    for epoch in range(3):
        for step in range(2):
            sent.append(0)
            one_step(train, ddp, step)
        stored.append(sum(p.numel() for p in model.parameters()))
        if epoch == 1:
            with torch.no_grad():
                model[4].u.zero_()
                model[4].v.zero_()
        drop_last_rank(model, optimizer, epoch)
        train.end_epoch()
    return {
        "mark": ddp.mark, "hooks": len(seen), "sent": sent[::2], "again": sent[1::2],
        "stored": stored, "equal": same_everywhere(model), "ranks": ranks(model),
        "views": ddp.gradient_as_bucket_view,
    }  # fmt: skip


def test_hooks_and_options_stay_and_only_what_is_stored_is_sent(pair):
    for result in pair(what_stays_of_a_wrapper):
        assert result["mark"] == "mine" and result["hooks"] == 6 and result["views"]
        assert result["sent"] == result["again"] == result["stored"]
        assert result["stored"][0] > result["stored"][1] > result["stored"][2]
        assert result["equal"] and result["ranks"]["4"] == 0  # which did not stall the others


def resumed_inside_a_wrapper() -> bool:
    def parts() -> tuple[nn.Module, DistributedDataParallel, LoD]:
        model = small_model()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        return model, ddp, LoD(ddp, optim.AdamW(model.parameters()), seed=1)

    model, ddp, train = parts()
    one_step(train, ddp)
    drop_last_rank(model, train.optimizer, 0)
    train.end_epoch()
    states = copy.deepcopy([part.state_dict() for part in (model, train.optimizer, train)])
    model_2, ddp_2, train_2 = parts()
    one_step(train_2, ddp_2, 5)  # its buckets are those of full ranks
    with pytest.warns(RanksCutWarning):
        model_2.load_state_dict(states[0])
    for part, state in zip((train_2.optimizer, train_2), states[1:], strict=True):
        part.load_state_dict(state)
    for which, wrapper in ((train, ddp), (train_2, ddp_2)):
        one_step(which, wrapper, 1)
    flat, flat_2 = (nn.utils.parameters_to_vector(m.parameters()) for m in (model, model_2))
    return torch.equal(flat, flat_2) and same_everywhere(model_2)


def test_a_live_wrapper_takes_over_a_state_of_smaller_ranks(pair):
    assert pair(resumed_inside_a_wrapper) == [True, True]


def joined() -> dict[str, Any]:
    model = small_model()
    ddp = DistributedDataParallel(model)
    train = LoD(ddp, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed=2)
    lost = []
    for epoch in range(3):
        with ddp.join():
            for step in range(2 + dist.get_rank()):  # one more in the second process
                one_step(train, ddp, 10 * epoch + step)
        drop_last_rank(model, train.optimizer, epoch)
        lost.append(train.end_epoch())
    one_step(train, ddp)
    return {"equal": same_everywhere(model), "lost": lost, "draws": train.sampler.fingerprint()}


def test_processes_with_different_numbers_of_batches_go_on_together_after_join(pair):
    first, second = pair(joined)
    assert first["equal"] and second["equal"]
    assert first["lost"] == second["lost"] and all(first["lost"])
    assert first["draws"] == second["draws"]


def message_of_uneven_steps() -> str:
    model = small_model()
    ddp = DistributedDataParallel(model)
    train = LoD(ddp, optim.SGD(model.parameters(), lr=0.1))
    one_step(train, ddp)
    if dist.get_rank() == 1:
        with train.step():
            pass
    with pytest.raises(MaestroError) as caught:
        train.end_epoch()
    return str(caught.value)


def test_uneven_steps_without_join_are_refused(pair):
    for message in pair(message_of_uneven_steps):
        assert "different numbers of steps in this epoch: 1 to 2." in message and "join" in message
