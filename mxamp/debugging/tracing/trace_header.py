"""The header of a trace: which versions, machine, precision and trainers its steps are of."""

import os
import platform
import time
from typing import Any, Dict, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer

from ..._version import __version__
from ...framework import machine
from ...policy.active import current_policy
from ...scaling.hook import TrainerHook
from .trace_lines import SCHEMA

__all__ = ["header", "rank_of"]

#: What tells processes of one run apart, where the kvstore does not.
_RANKS = ("DMLC_WORKER_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


def rank_of(trainers: Sequence[Trainer]) -> Optional[int]:
    """Return the number of this process in a distributed run; None where it runs alone."""
    for trainer in trainers:
        kvstore = trainer._kvstore or trainer._kvstore_params["kvstore"]
        if "dist" in str(getattr(kvstore, "type", "")):
            return int(kvstore.rank)
    found = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None


def header(
    trainers: Sequence[Trainer], rank: Optional[int], counts: Dict[int, int]
) -> Dict[str, Any]:
    """Return the first line of a trace, given the last steps of the trainers before it."""
    policy = current_policy()
    described = None
    if policy is not None:
        described = {
            "target_dtype": policy.target_dtype,
            "device": policy.device,
            "fp32_layers": list(policy.fp32_layers),
            "substitutions": sorted(policy.substitutions),
        }
    return {
        "kind": "header",
        "schema": SCHEMA,
        "time": time.time(),
        "mxamp": __version__,
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": {
            "cpu": machine.cpu_name(),
            "cores": machine.threads(),
            "features": sorted(machine.features()),
            "device": machine.default_device(),
            "system": platform.system(),
        },
        "dtype": policy.target_dtype if policy is not None else "float32",
        "policy": described,
        "trainers": [_described(trainer) for trainer in trainers],
        "rank": rank,
        "resumed_after": max(counts.values(), default=None),
    }


def _described(trainer: Trainer) -> Dict[str, Any]:
    hook = getattr(trainer, "_amp_loss_scaler", None)
    scaling = hook if isinstance(hook, TrainerHook) else None
    shapes = [param.shape for param in trainer._params]
    known = all(shape is not None and 0 not in shape for shape in shapes)
    return {
        "optimizer": type(trainer._optimizer).__name__,
        "learning_rate": trainer.learning_rate,
        "parameters": len(shapes),
        "elements": int(sum(np.prod(shape) for shape in shapes)) if known else None,
        "scaled_by": scaling.scaled_by if scaling is not None else None,
        "scaler": scaling.scaler.state_dict().get("kind") if scaling is not None else None,
        "devices": [str(context) for context in trainer._contexts],
    }
