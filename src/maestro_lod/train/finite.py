"""What has diverged is refused: a training that ends in NaN is no success."""

from __future__ import annotations

from torch import Tensor, nn

from maestro_lod.distributed.collectives import told_by_all
from maestro_lod.distributed.fsdp import shard_group
from maestro_lod.distributed.shards import local_part
from maestro_lod.errors import TrainingError, listed


def require_finite_loss(loss: Tensor) -> Tensor:
    """Return the loss, or refuse one that is NaN or infinite."""
    if not bool(loss.detach().isfinite().all()):
        raise TrainingError(
            f"the loss is {loss.detach()}. Lower the learning rate or clip gradients; the weights "
            "are as they were before this step."
        )
    return loss


def require_finite_parameters(model: nn.Module) -> None:
    """Refuse a model of which a parameter that is trained has become NaN or infinite."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    broken = [name for name, value in trained.items() if not local_part(value).isfinite().all()]
    if (group := shard_group(model)) is not None:  # of others, for all to stop alike
        broken = sorted({name for names in told_by_all(broken, group) for name in names})
    if broken:
        raise TrainingError(
            f"the weights of {listed(broken)} are not finite: the loss was NaN or infinite. "
            "Lower the learning rate or clip gradients, and go on from the last good checkpoint."
        )
