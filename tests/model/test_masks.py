import torch

from asr.model.masks import causal_mask, either, length_mask


def test_length_mask_covers_the_padding():
    expected = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    mask = length_mask(torch.tensor([2, 4]), 4)
    assert mask.shape == (2, 1, 1, 4)
    assert torch.equal(mask[:, 0, 0], expected)


def test_causal_mask_covers_the_future():
    expected = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert torch.equal(causal_mask(4), expected)


def test_causal_mask_of_twenty_leaves_each_row_its_past():
    mask = causal_mask(20)
    assert (~mask).sum(dim=1).tolist() == list(range(1, 21))
    assert not mask.tril().any()


def test_either_mask_covers():
    mask = torch.tensor([True, False, False])
    assert torch.equal(either(mask, torch.tensor([False, False, True])), torch.tensor([True, False, True]))
    assert either(None, mask) is mask
