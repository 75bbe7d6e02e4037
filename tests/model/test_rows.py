import torch

from asr.model.rows import select_rows


def test_rows_are_those_that_their_utterances_index_names():
    x, index = torch.randn(2, 5, 3, 4), torch.tensor([[4, 0, 0], [1, 1, 3]])
    assert torch.equal(select_rows(x, index), torch.stack([x[0, [4, 0, 0]], x[1, [1, 1, 3]]]))


def test_no_rows_of_none():
    assert select_rows(torch.zeros(2, 0, 3), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)


def test_rows_of_a_part_of_a_tensor():
    x, index = torch.randn(3, 4, 9)[:, :, 2:], torch.randint(0, 4, (3, 6))
    assert torch.equal(select_rows(x, index), x.gather(1, index[:, :, None].expand(-1, -1, 7)))
