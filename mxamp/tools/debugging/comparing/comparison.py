"""The errors of mixed precision against float32, layer by layer: what `compare` returns."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ....framework.wording import counted
from ...tables import html_table, text_table
from .pictures import comparison_figure, png_html, written

__all__ = ["Comparison", "TensorError"]

#: So many lines has each table.
_SHOWN = 10
_HEADINGS = ("name", "block", "operator", "precision", "relative", "maximum", "lost")


@dataclass(frozen=True)
class TensorError:
    """How far the output of a layer, or the gradient of a parameter, is from float32's.

    `relative` and `maximum` are those of the batch where they are largest.
    """

    name: str  #: of the layer or the parameter
    block: str  #: that it belongs to; empty where that is not known
    operator: str  #: of the layer; for a gradient, of the layer that reads the parameter
    precision: str  #: the dtype that this operator computes in
    shape: Tuple[int, ...]
    relative: float  #: L2 norm of the difference over that of float32's values
    maximum: float  #: largest absolute difference
    lost: int  #: elements that are finite in float32 alone


@dataclass(frozen=True)
class Comparison:
    """The errors of a net in mixed precision: `str(comparison)` is a table, worst first.

    `outputs` are those of the layers in the order in which they run, `gradients` those of the
    parameters, in their order. `first_jump` is the first layer at which the error jumps, or None.
    """

    dtype: str
    loss_scale: float  #: of the backward pass in mixed precision; taken out of the gradients again
    outputs: Tuple[TensorError, ...]
    gradients: Tuple[TensorError, ...] = ()
    first_jump: Optional[TensorError] = None

    @property
    def worst_outputs(self) -> Tuple[TensorError, ...]:
        """The outputs of layers, those with lost elements first, then by relative error."""
        return _ranked(self.outputs)

    @property
    def worst_gradients(self) -> Tuple[TensorError, ...]:
        """The gradients of parameters, likewise."""
        return _ranked(self.gradients)

    def to_dict(self) -> Dict[str, Any]:
        """Return it all as plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """Return it all as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: Union[None, str, Path] = None) -> Any:
        """Draw the error of each layer in the order of execution; needs matplotlib.

        Returns matplotlib's figure, and writes it to `path`, in the format of its suffix.
        Raises `InstallError` without matplotlib.
        """
        return written(comparison_figure(self.to_dict()), path)

    def summary(self) -> str:
        """Return one line: where the error jumps first, and what was lost."""
        lost = sum(error.lost for error in (*self.outputs, *self.gradients))
        jump = "no layer at which the error jumps"
        if self.first_jump is not None:
            first = self.first_jump
            jump = f"the error jumps first at {first.name} ({first.operator}, {first.precision})"
        scale = f", loss scale {self.loss_scale:g}" if self.gradients else ""
        return f"{self.dtype} against float32{scale}: {jump}; {counted(lost, 'element')} not finite"

    def __str__(self) -> str:
        parts = [self.summary()]
        for kind, errors in self._tables():
            parts += ["", kind, text_table(_HEADINGS, _rows(errors))]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        tables = "".join(
            html_table(_HEADINGS, _rows(errors), caption) for caption, errors in self._tables()
        )
        return (
            f"<p>{self.summary()}</p>{png_html(lambda: comparison_figure(self.to_dict()))}{tables}"
        )

    def __repr__(self) -> str:
        return f"<Comparison: {self.summary()}>"

    def _tables(self) -> Sequence[Tuple[str, Sequence[TensorError]]]:
        """Return the tables that are shown: captions and lines."""
        kinds = [("outputs of layers", self.worst_outputs)]
        if self.gradients:
            kinds.append(("gradients of parameters", self.worst_gradients))
        return [
            (f"{kind}, the worst {min(len(all_), _SHOWN)} of {len(all_)}", all_[:_SHOWN])
            for kind, all_ in kinds
        ]


def _ranked(errors: Sequence[TensorError]) -> Tuple[TensorError, ...]:
    return tuple(sorted(errors, key=lambda error: (-error.lost, -error.relative)))


def _rows(errors: Sequence[TensorError]) -> List[Tuple[Any, ...]]:
    return [
        (e.name, e.block, e.operator, e.precision, e.relative, e.maximum, e.lost) for e in errors
    ]
