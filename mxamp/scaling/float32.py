"""Loss scaling where "auto" has chosen float32: there is none, and trainers are as in MXNet."""

from typing import Any, Dict, Mapping

from .scaler import NoScaler, Scaler

__all__ = ["Float32Scaler"]


class Float32Scaler(NoScaler):
    """A scale of 1, and every update is done, as in plain MXNet.

    Its state is that of a `NoScaler`: state files go from one machine to another.
    """

    @property
    def checks(self) -> bool:
        """False: plain MXNet looks at no gradient."""
        return False

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Check `state`, and go on as before: there is nothing to resume."""
        super().resumed(state)
        return self

    def assign_scale(self, scale: float) -> None:
        """Keep the scale of 1: a script may assign what another machine has saved."""

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of a `NoScaler`."""
        return NoScaler().state_dict()

    def __repr__(self) -> str:
        return "Float32Scaler()"
