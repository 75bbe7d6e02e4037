import pytest
import torch

from asr.training.averaging import average_checkpoints, interpolate


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


def test_between_two_models_lies_their_weighted_mean():
    after, before = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 2.0])}
    assert interpolate(after, before, 0.25)["w"].tolist() == [2.0, 2.0]
