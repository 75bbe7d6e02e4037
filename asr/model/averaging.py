"""The mean of models that were trained from the same one ("model soups", Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from asr.model.folder import ModelError
from asr.model.speech_model import SpeechModel
from asr.model.transformer import CONFIG_OF_THE_VOCABULARY, OF_THE_VOCABULARY


def average_models(folders: Sequence[str | Path]) -> SpeechModel:
    """The first model with the mean weights of all models, summed in float64. A model with another tokenizer does not
    contribute the weights that depend on the vocabulary.

    Raises ModelError for a folder that holds no recogniser, or one whose shape differs from the first model's."""
    model = SpeechModel.load(folders[0])
    totals = {name: (tensor.double(), 1) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for folder in folders[1:]:
        other = SpeechModel.load(folder)
        own = OF_THE_VOCABULARY if other.tokenizer != model.tokenizer else ()
        _check_alike(other, model, folder, CONFIG_OF_THE_VOCABULARY if own else ())
        weights = other.state_dict()
        for name, (total, count) in totals.items():
            if not name.removeprefix("transformer.").startswith(own):
                totals[name] = total + weights[name], count + 1
    model.load_state_dict({name: (total / count).float() for name, (total, count) in totals.items()}, strict=False)
    return model


def _check_alike(model: SpeechModel, first: SpeechModel, folder: str | Path, besides: tuple[str, ...]) -> None:
    """Raises ModelError naming the first field in which the model in `folder` differs from the first model; the fields
    in `besides` may differ."""
    if model.front_end.config != first.front_end.config:
        raise ModelError(f"{folder}: other features than the first model's")
    config, first_config = model.transformer.config, first.transformer.config
    for name in (field.name for field in fields(config) if field.name not in ("vocab_size", "dropout", *besides)):
        found, wanted = getattr(config, name), getattr(first_config, name)
        if found != wanted:
            raise ModelError(f"{folder}: {name} is {found}, and {wanted} in the first model")
