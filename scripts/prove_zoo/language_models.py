"""GluonNLP's models, made smaller: as many kinds of layers, fewer of them."""

from typing import Any, Callable, Dict, Tuple

import mxnet as mx
from mxnet import nd

_WORDS, _LENGTH, _ROWS, _UNITS = 1000, 24, 2, 64


class _Vocabulary:
    """As much of GluonNLP's vocabulary as models ask for."""

    def __len__(self) -> int:
        return _WORDS


def _words(shape: Tuple[int, ...]) -> Any:
    return nd.random.randint(0, _WORDS, shape=shape).astype("float32")


def bert() -> Tuple[Any, Callable[[], Tuple[Any, ...]]]:
    """Return BERT with its pooler and both of its classifiers' inputs."""
    from gluonnlp.model.bert import BERTEncoder, BERTModel

    encoder = BERTEncoder(
        units=_UNITS, hidden_size=4 * _UNITS, num_layers=2, num_heads=4, max_length=_LENGTH
    )
    net = BERTModel(
        encoder, vocab_size=_WORDS, token_type_vocab_size=2, units=_UNITS, embed_size=_UNITS,
        use_decoder=False, use_classifier=True,
    )  # fmt: skip
    lengths = nd.array([_LENGTH, _LENGTH - 5])
    return net, lambda: (_words((_ROWS, _LENGTH)), nd.zeros((_ROWS, _LENGTH)), lengths)


def transformer() -> Tuple[Any, Callable[[], Tuple[Any, ...]]]:
    """Return the encoder of the translation model."""
    from gluonnlp.model.transformer import TransformerEncoder

    net = TransformerEncoder(
        num_layers=2, units=_UNITS, hidden_size=4 * _UNITS, max_length=_LENGTH, num_heads=4
    )
    lengths = nd.array([_LENGTH, _LENGTH - 5])
    return net, lambda: (nd.random.normal(shape=(_ROWS, _LENGTH, _UNITS)), None, lengths)


def language_model() -> Tuple[Any, Callable[[], Tuple[Any, ...]]]:
    """Return the LSTM language model."""
    from gluonnlp.model.language_model import StandardRNN

    net = StandardRNN("lstm", _WORDS, _UNITS, _UNITS, 2, dropout=0.2, tie_weights=False)

    def example() -> Tuple[Any, ...]:
        return _words((_LENGTH, _ROWS)), net.begin_state(batch_size=_ROWS, func=nd.zeros)

    return net, example


MODELS: Dict[str, Callable[[], Tuple[Any, Callable[[], Tuple[Any, ...]]]]] = {
    "bert": bert, "transformer": transformer, "language_model": language_model,
}  # fmt: skip


def build(name: str) -> Any:
    """Return a model by its name; it knows its own example."""
    mx.random.seed(0)
    net, net_example = MODELS[name.split(":")[1]]()
    net.example = net_example
    return net
