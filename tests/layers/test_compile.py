"""torch.compile, autocast and gradient checkpointing give what plain eager code gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from maestro_lod import LoD, at_ranks, decompose, load, ranks, save, shrink
from maestro_lod.errors import TrainingError
from maestro_lod.layers import LowRank

RANKS = {"0": 4, "3": 8, "5": 3}


def low_rank_model() -> nn.Module:
    torch.manual_seed(0)
    return decompose(
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(),
            nn.Linear(8, 3),
        )
    )  # fmt: skip


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 2, 4, 4, generator=generator)
    return x, torch.randint(3, (size,), generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@torch.no_grad()
def zero_tail(model: nn.Module, name: str, keep: int) -> None:
    layer = model.get_submodule(name)
    assert isinstance(layer, LowRank)
    layer.u[:, keep:] = 0
    layer.v[keep:] = 0


class CountGraphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        return graph


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- torch.compile -----------------------------------------------------------------------------


def test_one_graph_while_ranks_are_sampled_and_one_more_per_shrink():
    model, graphs = low_rank_model(), CountGraphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    train = LoD(compiled, optimizer, threshold=1e-6)
    x, y = batch()
    drawn = set()
    for epoch, name in enumerate(["3", "0", "5"]):
        for _ in range(25):
            with train.step() as active:
                F.cross_entropy(compiled(x), y).backward()
            drawn.update(active.items())
            optimizer.step()
            optimizer.zero_grad()
        compiled(x)  # at full rank, outside of a step
        assert graphs.count == epoch + 1
        zero_tail(model, name, 2)
        assert list(train.end_epoch()) == [name]
    assert len(drawn) >= 15


@pytest.mark.slow
def test_no_number_of_shrinks_exhausts_the_recompilations():
    model, counter = decompose(nn.Linear(24, 24)), CountGraphs()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rank in range(23, 3, -1):
        compiled(torch.randn(2, 24))
        zero_tail(model, "", rank)
        assert shrink(model, threshold=1e-6) == {"": 1}
    assert counter.count == 20  # one per shape: neither given up nor compiled more often


@pytest.mark.parametrize("dense", [nn.Linear(512, 512), nn.Conv2d(64, 64, 3)], ids=["fc", "conv"])
def test_large_products_compile_into_one_graph(dense):
    model = decompose(dense)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 512) if isinstance(dense, nn.Linear) else torch.randn(8, 64, 12, 12)
    for given in (model.full_rank, 2):  # multiplied out, and one factor after the other
        with at_ranks(model, given):
            model.zero_grad()
            compiled(x).square().mean().backward()
            ours = gradients(model)
            model.zero_grad()
            model(x).square().mean().backward()
        for eager, gradient in zip(gradients(model), ours, strict=True):
            torch.testing.assert_close(gradient, eager, rtol=1e-3, atol=1e-6)


def test_training_and_evaluation_take_a_graph_each():
    model, graphs = low_rank_model(), CountGraphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    x, _ = batch()
    for rank in (1, 2, 3):
        with at_ranks(model, rank):
            compiled.train()(x)
            compiled.eval()(x)
            with torch.no_grad():
                compiled.eval()(x)
    assert graphs.count <= 3  # training, evaluation, evaluation without gradients


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_results_and_gradients_equal_eager_slices(backend):
    model = low_rank_model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, y = batch()
    for given in ({}, {"0": 1}, {"3": 5}, {"5": 2}, {"0": 3, "3": 1, "5": 1}, {"3": 0}):
        results = []
        for forward in (model, compiled):
            model.zero_grad()
            with at_ranks(model, given):
                output = forward(x)
                F.cross_entropy(output, y).backward()
            results.append([output.detach(), *gradients(model)])
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


def test_compiled_results_stay_right_after_a_shrink_to_zero():
    model = low_rank_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, _ = batch()
    compiled(x)
    zero_tail(model, "3", 0)
    shrink(model, threshold=1e-9)
    assert ranks(model)["3"] == 0
    torch.testing.assert_close(compiled(x), model(x))


def test_two_compiled_forwards_at_different_ranks_share_one_backward():
    model = low_rank_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, y = batch()
    results = []
    for forward in (model, compiled):
        model.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        with at_ranks(model, {"3": 2}):
            loss = loss + F.cross_entropy(forward(x), y)
        loss.backward()
        results.append(gradients(model))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


def test_batches_of_changing_size_work_compiled():
    model = low_rank_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (6, 3, 64, 5):
        x, _ = batch(size)
        with at_ranks(model, {"3": 3}):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-6)


def test_lod_over_a_compiled_model_equals_lod_over_the_model():
    runs = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager")):
        model = low_rank_model()
        forward = wrap(model)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train = LoD(forward, optimizer, penalty=0.03, threshold=1e-3)
        for _ in range(4):
            for size in (6, 6, 6):
                x, y = batch(size)
                with train.step():
                    (F.cross_entropy(forward(x), y) + train.penalty_loss()).backward()
                optimizer.step()
                optimizer.zero_grad()
            zero_tail(model, "3", 3)
            train.end_epoch()
        runs.append((train.history, dict(model.named_parameters())))
    (history, parameters), (compiled_history, compiled_parameters) = runs
    assert compiled_history == history
    assert history[-1]["3"] == 3
    for name, value in parameters.items():
        torch.testing.assert_close(compiled_parameters[name], value, rtol=1e-3, atol=1e-5)


def test_a_compiled_forward_outside_step_is_detected():
    model = low_rank_model()
    compiled = torch.compile(model, backend="eager")
    train = LoD(compiled, optim.SGD(model.parameters(), lr=0.1))
    x, _ = batch()
    for _ in range(3):
        with train.step():
            compiled(x)
    train.optimizer.step()
    assert train.end_epoch() == {}
    for _ in range(3):
        compiled(x)
        with train.step():
            pass
    with pytest.raises(TrainingError, match="inside step"):
        train.end_epoch()


def test_no_hook_stays_on_a_compiled_model_after_an_epoch():
    model = low_rank_model()
    compiled = torch.compile(model, backend="eager")
    train = LoD(compiled, optim.SGD(model.parameters(), lr=0.1))
    with train.step():
        compiled(batch()[0]).sum().backward()
    train.optimizer.step()
    train.end_epoch()
    assert not model._forward_pre_hooks


def test_a_model_compiled_in_place_works():
    model = low_rank_model()
    eager = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1))
    x, _ = batch()
    with train.step() as drawn:
        ours = model(x)
    with at_ranks(eager, drawn):
        torch.testing.assert_close(ours, eager(x), rtol=1e-4, atol=1e-6)
    train.optimizer.step()
    train.end_epoch()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_the_penalty_can_be_compiled_along():
    model = low_rank_model()
    train = LoD(model, optim.SGD(model.parameters(), lr=0.1), penalty=0.1)
    x, y = batch()

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y) + train.penalty_loss()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        model.zero_grad()
        value = function()
        value.backward()
        results.append([value.detach(), *gradients(model)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


# -- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bfloat16_autocast_trains_in_float32_parameters(compiled):
    model = low_rank_model()
    reference = copy.deepcopy(model)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train = LoD(forward, optimizer, penalty=1e-3, threshold=1e-3)
    x, y = batch()
    with train.step() as drawn, torch.autocast("cpu", torch.bfloat16):
        output = forward(x)
        loss = F.cross_entropy(output, y) + train.penalty_loss()
        loss.backward()
    assert output.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    with at_ranks(reference, drawn):
        exact = reference(x)
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.05)
    optimizer.step()
    train.end_epoch()


# -- gradient checkpointing --------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A model whose body is run again in the backward."""

    def __init__(self, body: nn.Module, use_reentrant: bool | None) -> None:
        super().__init__()
        self.body, self.use_reentrant = body, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("sampling", ["pairs", "several"])
def test_gradient_checkpointing_is_exact_inside_step(use_reentrant, sampling):
    runs = []
    for mode in (None, use_reentrant):
        model = Checkpointed(low_rank_model(), mode)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train = LoD(model, optimizer, penalty=0.03, threshold=1e-3, sampling=sampling)
        x, y = batch()
        x.requires_grad_()  # the reentrant mode asks for it
        for _ in range(2):
            for _ in range(8):
                with train.step():
                    (F.cross_entropy(model(x), y) + train.penalty_loss()).backward()
                optimizer.step()
                optimizer.zero_grad()
            zero_tail(model, "body.3", 3)
            train.end_epoch()
        runs.append(dict(model.named_parameters()))
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_is_exact_with_a_full_pass(use_reentrant):
    results = []
    for mode in (None, use_reentrant):
        model = Checkpointed(low_rank_model(), mode)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        train = LoD(model, optimizer, full_pass=True, distill=True)
        x, y = batch()
        x.requires_grad_()
        for _ in range(5):
            train.backward(lambda m=model, x=x: m(x), lambda o, y=y: F.cross_entropy(o, y))
        results.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_copy_of_the_active_rank_cannot_go_astray(tmp_path):
    """Graphs read it from a tensor, which what moves and copies tensors must not touch."""
    model, (x, _) = low_rank_model(), batch()
    expected = model(x)
    save(model, tmp_path / "m.safetensors")
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    for layer in empty.modules():
        if isinstance(layer, LowRank):
            assert layer._limit == model[0]._limit
    load(tmp_path / "m.safetensors", into=empty)
    assigned = copy.deepcopy(model).to("meta")
    assigned.load_state_dict(model.state_dict(), assign=True)
    averaged = AveragedModel(model)
    with at_ranks(model, 1):
        averaged.update_parameters(model)
    for other in (empty, assigned, averaged.module):
        compiled = torch.compile(other, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
