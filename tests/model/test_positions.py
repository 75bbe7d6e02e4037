import math

import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.positions import Positions, rotate, sinusoids, sinusoids_in_halves


def test_the_third_position_of_four_dimensions():
    torch.testing.assert_close(sinusoids(3, 4)[2], torch.tensor([0.9093, -0.4161, 0.0200, 0.9998]), atol=1e-4, rtol=0)


def test_each_entry_is_the_papers_formula():
    table = sinusoids(50, 16)
    for pos in (0, 1, 7, 49):
        for i in range(8):
            angle = pos / 10000 ** (2 * i / 16)
            assert table[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_in_halves_all_sines_come_first_and_the_slowest_angle_is_a_ten_thousandth():
    table = sinusoids_in_halves(50, 16, offset=2)
    for pos in (0, 1, 49):
        for i in range(8):
            angle = (pos + 2) / 10000 ** (i / 7)
            assert table[pos, i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[pos, 8 + i].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_positions_begin_where_the_configuration_says():
    config = ModelConfig(
        positions="sinusoidal_halves", first_position=2, d_model=16, num_heads=2, scale_embedding=False
    )
    x = Positions(config).eval()(torch.zeros(1, 5, 16), offset=3)
    torch.testing.assert_close(x[0], sinusoids_in_halves(5, 16, offset=5))


def test_low_dimensions_turn_fastest():
    changes = sinusoids(100, 32).diff(dim=0).abs().mean(dim=0)
    assert (changes[0:-2:2] > changes[2::2]).all()


def test_a_shift_is_a_rotation_that_depends_on_the_shift_alone():
    table, k = sinusoids(200, 16).view(200, 8, 2), 5
    sin, cos = table[..., 0], table[..., 1]
    shift_sin, shift_cos = sin[k], cos[k]  # PE(k) holds the angles
    turned = torch.stack([sin * shift_cos + cos * shift_sin, cos * shift_cos - sin * shift_sin], dim=-1)
    torch.testing.assert_close(table[k:], turned[:-k], atol=1e-4, rtol=0)


def test_no_two_of_ten_thousand_positions_are_alike():
    table = sinusoids(10_000, 64).double()
    for start in range(0, 10_000, 2_000):
        distances = torch.cdist(table[start : start + 2_000], table)
        distances[torch.arange(2_000), torch.arange(start, start + 2_000)] = 1.0
        assert distances.min() > 1e-3


def test_an_offset_goes_on_where_the_table_was():
    torch.testing.assert_close(sinusoids(3, 8, offset=4), sinusoids(7, 8)[4:])


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary"])
def test_embeddings_are_scaled_by_the_root_of_d_before_positions_are_added(kind):
    config = ModelConfig(positions=kind, d_model=16, num_heads=2)
    positions = Positions(config).eval()
    x = torch.randn(2, 5, 16)
    added = positions(x) - positions(torch.zeros_like(x))
    torch.testing.assert_close(added, 4 * x, atol=1e-5, rtol=0)
    unscaled = Positions(ModelConfig(positions=kind, d_model=16, num_heads=2, scale_embedding=False)).eval()
    torch.testing.assert_close(unscaled(x) - unscaled(torch.zeros_like(x)), x, atol=1e-5, rtol=0)


def test_the_table_of_sinusoids_grows_with_the_input():
    positions = Positions(ModelConfig(d_model=8, num_heads=2)).eval()
    torch.testing.assert_close(positions(torch.zeros(1, 3000, 8))[0], sinusoids(3000, 8), atol=1e-5, rtol=0)


def test_a_table_that_another_thread_replaces_is_still_long_enough():
    class Overtaken(Positions):
        cached = property(lambda self: sinusoids(10, 8), lambda self, table: None)

    vectors = Overtaken(ModelConfig(d_model=8, num_heads=2)).vectors(0, 600, torch.device("cpu"))
    torch.testing.assert_close(vectors, sinusoids(600, 8))


def test_a_learned_table_has_an_end():
    positions = Positions(ModelConfig(positions="learned", max_positions=10, d_model=8, num_heads=2))
    with pytest.raises(ValueError, match="max_positions=10"):
        positions(torch.zeros(1, 11, 8))


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    at = torch.arange(60)
    score = [(rotate(q, at[i + 7 : i + 8]) * rotate(k, at[i : i + 1])).sum().item() for i in range(0, 50, 10)]
    assert score == pytest.approx([score[0]] * 5, abs=1e-4)
    assert (rotate(q) * rotate(k)).sum().item() == pytest.approx((q * k).sum().item(), abs=1e-5)
