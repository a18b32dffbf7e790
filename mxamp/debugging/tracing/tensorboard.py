"""Steps of a trace as TensorBoard shows them, by tensorboardX."""

from typing import Any, Dict, Optional

from ...errors import InstallError

__all__ = ["add_scalars", "event_writer"]

NO_TENSORBOARD = "tensorboard= needs tensorboardX: pip install 'mxamp[tensorboard]'"


def event_writer() -> Any:
    """Return the class that writes event files into a folder."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InstallError(NO_TENSORBOARD) from None
    return SummaryWriter


def add_scalars(writer: Any, line: Dict[str, Any], loss: Optional[float], several: bool) -> None:
    """Write a step's line, with its loss; `several`: under the number of its trainer."""
    prefix = f"trainer {line['trainer']}/" if several else "training/"
    scalars = {
        "loss": loss,
        "loss scale": line["loss_scale"],
        "skipped": float(not line["stepped"]),
        "seconds a step": line["seconds"],
        "memory": line["memory"],
    }
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(prefix + name, value, line["step"], walltime=line["time"])
