import shutil
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch

from asr.training.averaging import (
    BestCheckpoints,
    average_checkpoints,
    best_checkpoints,
    figure_of,
    interpolate,
)
from asr.training.module import SpeechTraining
from asr.training.resuming import LastCheckpoint
from asr.training.run import train
from tests.training.tones import options


def test_the_average_of_checkpoints_is_the_mean_of_their_weights(tmp_path):
    weights = [torch.randn(3, 4) for _ in range(3)]
    for i, weight in enumerate(weights):
        torch.save({"state_dict": {"model.w": weight, "other.w": torch.ones(1)}}, tmp_path / f"{i}.ckpt")
    average = average_checkpoints([tmp_path / f"{i}.ckpt" for i in range(3)])
    assert set(average) == {"w"}
    torch.testing.assert_close(average["w"], sum(weights) / 3)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="no checkpoint"):
        average_checkpoints([])


def test_of_equally_good_epochs_the_earlier_is_the_better(tmp_path):
    names = ["005-7.00", "003-6.50", "004-6.50", "001-7.00", "002-10.00", "000-nan", "last", "before-000-1.00"]
    (tmp_path / "checkpoints").mkdir()
    for name in names:
        (tmp_path / "checkpoints" / f"{name}.ckpt").touch()
    best = [path.stem for path in best_checkpoints(tmp_path)]
    assert best == ["003-6.50", "004-6.50", "001-7.00", "005-7.00", "002-10.00", "000-nan"]


def test_between_two_models_lies_their_weighted_mean():
    after, before = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 2.0])}
    assert interpolate(after, before, 0.25)["w"].tolist() == [2.0, 2.0]


def test_with_another_dev_set_the_best_epochs_are_chosen_anew(corpus, tmp_path, caplog, monkeypatch):
    train(options(corpus, tmp_path, "epochs=2", "validate_every=1"))
    for best in best_checkpoints(tmp_path):
        best.rename(best.with_name(f"{best.name[:3]}-0.00.ckpt"))  # the best possible WER, on an easier set
    resumed = ["epochs=3", "validate_every=1", "resume=true", f"data.dev=[{corpus / 'train'}]", "save_minutes=0"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went"):
        patch.setattr(SpeechTraining, "on_validation_start", MagicMock(side_effect=RuntimeError("the power went")))
        train(options(corpus, tmp_path, *resumed))
    assert len(best_checkpoints(tmp_path)) == 2  # no epoch has been scored on it yet
    train(options(corpus, tmp_path, *resumed))
    assert [path.name[:3] for path in best_checkpoints(tmp_path)] == ["002"]
    assert len(list((tmp_path / "checkpoints").glob("before-*"))) == 2  # nothing is lost
    assert "chosen on another dev set" in caplog.text


def test_an_epoch_that_is_repeated_is_averaged_once(corpus, tmp_path, monkeypatch):
    """The training is killed after the best checkpoints were written and before last.ckpt was."""
    saved = LastCheckpoint.on_train_epoch_end

    def dies(self, trainer, module):
        if trainer.current_epoch == 1:
            raise RuntimeError("the power went")
        saved(self, trainer, module)

    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoint, "on_train_epoch_end", dies)
        with pytest.raises(RuntimeError, match="the power went"):
            train(options(corpus, tmp_path, "epochs=2", "validate_every=1"))
    train(options(corpus, tmp_path, "epochs=2", "validate_every=1", "resume=true"))
    assert sorted(path.name[:3] for path in best_checkpoints(tmp_path)) == ["000", "001"]


def test_an_epoch_that_is_repeated_replaces_what_it_had_saved_before_a_kill(corpus, tmp_path):
    train(options(corpus, tmp_path, "epochs=1", "validate_every=1"))
    [best] = best_checkpoints(tmp_path)
    shutil.copy(best, best.with_name("001-0.00.ckpt"))  # written before the kill, unlike last.ckpt
    train(options(corpus, tmp_path, "epochs=2", "validate_every=1", "resume=true", "optimizer.lr=1e-9"))
    assert "001-0.00.ckpt" not in {path.name for path in best_checkpoints(tmp_path)}


@pytest.mark.parametrize("change", ["", "transcript", "normalizer"])
def test_so_they_are_where_the_same_recordings_say_something_else(corpus, tmp_path, change):
    dev = tmp_path / "dev"
    shutil.copytree(corpus / "dev", dev)
    settings = ["validate_every=1", f"data.dev=[{dev}]"]
    train(options(corpus, tmp_path / "exp", "epochs=1", *settings))
    if change == "transcript":
        (dev / "0.txt").write_text("Another.")
    if change == "normalizer":
        settings.append("data.normalizer=none")
    train(options(corpus, tmp_path / "exp", "epochs=2", *settings, "resume=true"))
    assert bool(list((tmp_path / "exp" / "checkpoints").glob("before-*"))) == bool(change)


def test_another_dev_set_costs_nothing_before_an_epoch_is_scored_on_it(corpus, tmp_path):
    begun = options(corpus, tmp_path, "epochs=1", "validate_every=1", "resume=true")
    train(begun)
    kept = best_checkpoints(tmp_path)
    train(replace(begun, data=replace(begun.data, dev=[str(corpus / "train")])))  # there is no epoch left
    assert best_checkpoints(tmp_path) == kept
    train(replace(begun, epochs=2))
    assert {path.name[:3] for path in best_checkpoints(tmp_path)} == {"000", "001"}


def test_with_fewer_to_average_than_before_the_best_of_those_that_are_left_stay(tmp_path):
    figures = {str(tmp_path / f"{i}.ckpt"): torch.tensor(figure) for i, figure in enumerate((3.0, 1.0, 4.0, 2.0))}
    of_four, of_two = (
        BestCheckpoints(types.SimpleNamespace(earlier_dev_set=None), tmp_path, "dev/wer", 2, count) for count in (4, 2)
    )
    of_four.best_k_models, of_four.kth_best_model_path = figures, str(tmp_path / "2.ckpt")
    for gone in ([], ["2.ckpt"], ["2.ckpt", "0.ckpt"]):
        for path in figures:
            Path(path).touch()
        for name in gone:
            (tmp_path / name).unlink()
        of_two.load_state_dict(of_four.state_dict())
        better = [of_two.check_monitor_top_k(L.Trainer(logger=False), torch.tensor(wer)) for wer in (1.9, 2.1)]
        assert sorted(of_two.best_k_models.values()) == [1.0, 2.0] and better == [True, False]


def test_the_best_epoch_alone_is_not_scored_again_but_on_another_dev_set(corpus, tmp_path, monkeypatch):
    config = options(corpus, tmp_path, "epochs=2", "validate_every=1", "average=1")
    with monkeypatch.context() as patch:
        patch.setattr(L.Trainer, "validate", None)
        assert train(config)[1] == figure_of(best_checkpoints(tmp_path)[0])
    there = replace(config, resume=True, data=replace(config.data, dev=[str(corpus / "train")]))
    scored = MagicMock(return_value=[{"dev/wer": 12.5}])
    monkeypatch.setattr(L.Trainer, "validate", scored)
    assert train(there)[1] == 12.5


def test_a_best_checkpoint_that_was_moved_away_does_not_count(corpus, tmp_path):
    train(options(corpus, tmp_path, "epochs=1", "validate_every=1", "average=1"))
    (best,) = best_checkpoints(tmp_path)
    best.rename(tmp_path / "away.ckpt")
    resumed = options(corpus, tmp_path, "epochs=2", "validate_every=1", "average=1", "optimizer.lr=1e-9", "resume=true")
    train(resumed)
    assert [path.name[:3] for path in best_checkpoints(tmp_path)] == ["001"]
