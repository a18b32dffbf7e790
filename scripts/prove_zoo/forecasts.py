"""Trains three of GluonTS's estimators for three epochs and prints what they forecast.

    python scripts/prove_zoo/forecasts.py
    mxamp run --dtype bfloat16 scripts/prove_zoo/forecasts.py
    python scripts/prove_zoo/forecasts.py --stock

It knows nothing of mxamp: the second command is how a script of anybody's gets mixed precision. The
last one uses mxnet.contrib.amp. Needs gluonts==0.11.12, which no extra of mxamp installs.
"""

import sys
import warnings
from typing import Any, Dict, List

import mxnet as mx
import numpy as np

if "--stock" in sys.argv:
    from mxnet.contrib import amp

    amp.init("bfloat16")

warnings.simplefilter("ignore")
from gluonts.dataset.common import ListDataset  # noqa: E402
from gluonts.mx import (  # noqa: E402
    DeepAREstimator,
    SimpleFeedForwardEstimator,
    Trainer,
    TransformerEstimator,
)
from gluonts.mx.trainer.callback import Callback  # noqa: E402

ESTIMATORS: Dict[Any, Dict[str, str]] = {
    SimpleFeedForwardEstimator: {},
    DeepAREstimator: {"freq": "D"},
    TransformerEstimator: {"freq": "D"},
}


class Losses(Callback):  # type: ignore[misc]
    """Keeps the loss of each epoch."""

    def __init__(self) -> None:
        self.values: List[float] = []

    def on_train_epoch_end(self, epoch_no: int, epoch_loss: float, **_: Any) -> bool:
        """Keep it, and go on."""
        self.values.append(float(epoch_loss))
        return True


def main() -> None:
    """Train, forecast and print."""
    days = np.arange(200)
    waves = [(10 + 3 * np.sin(days / 7 + k)).astype("float32") for k in range(4)]
    series = ListDataset([{"start": "2020-01-01", "target": wave} for wave in waves], freq="D")
    for estimator, options in ESTIMATORS.items():
        mx.random.seed(0)
        np.random.seed(0)
        losses = Losses()
        trainer = Trainer(epochs=3, num_batches_per_epoch=8, learning_rate=1e-2, callbacks=[losses])
        made = estimator(prediction_length=10, context_length=20, trainer=trainer, **options)
        try:
            forecasts = [forecast.mean for forecast in made.train(series).predict(series)]
        except Exception as error:  # the next one may run
            print(f"{estimator.__name__}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if not np.isfinite(forecasts).all():
            raise SystemExit(f"{estimator.__name__}: forecasts are not finite")
        trained = " ".join(f"{value:.3f}" for value in losses.values)
        begins = " ".join(f"{value:.2f}" for value in forecasts[0][:3])
        print(f"{estimator.__name__}: losses {trained}; forecast {begins}")


if __name__ == "__main__":
    main()
