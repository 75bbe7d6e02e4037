import pytest
import torch

from asr.decode.top import BLOCK, WIDE, top_k


@pytest.mark.parametrize("width", [7, WIDE, WIDE + 1, 51_864])
@pytest.mark.parametrize("k", [1, 5])
def test_the_highest_and_their_places_are_those_of_a_full_search(width, k):
    x = torch.randn(3, 2, width)
    values, places = top_k(x, k)
    expected = x.topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_several_of_the_highest_in_one_block_and_in_the_rest_are_found():
    x = torch.zeros(1, WIDE + BLOCK // 2)
    for value, place in ((3.0, 5), (2.0, 6), (4.0, WIDE + 3)):
        x[0, place] = value
    values, places = top_k(x, 3)
    assert values.tolist() == [[4.0, 3.0, 2.0]]
    assert places.tolist() == [[WIDE + 3, 5, 6]]
