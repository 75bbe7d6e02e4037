from itertools import pairwise

import pytest

from asr.training.config import OptimizerConfig
from asr.training.schedule import lr_factor, warmup_updates


def rates(updates: int = 1000, **changes) -> list[float]:
    return [lr_factor(update, OptimizerConfig(**changes), updates) for update in range(updates)]


@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt"])
def test_the_rate_rises_linearly_to_its_peak_and_falls(schedule):
    values = rates(schedule=schedule, warmup=100)
    assert values[0] == pytest.approx(0.01)
    assert values[49] == pytest.approx(0.5)
    assert max(values) == values[99] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(values[99:]))


def test_cosine_ends_at_zero_and_stays_there():
    assert rates(schedule="cosine")[-1] == pytest.approx(0.0, abs=1e-6)
    assert lr_factor(5000, OptimizerConfig(), 1000) == pytest.approx(0.0, abs=1e-6)


def noam(step: int, d_model: int, warmup: int) -> float:
    """ "Attention Is All You Need", equation 3."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def test_inverse_square_root_is_the_papers_curve():
    config = OptimizerConfig(schedule="inverse_sqrt", warmup=400)
    peak = noam(400, 512, 400)
    for step in (1, 100, 400, 401, 2000, 9000):
        assert lr_factor(step - 1, config, 10_000) == pytest.approx(noam(step, 512, 400) / peak)


def test_warm_up_is_a_number_of_updates_or_a_part_of_all():
    assert warmup_updates(OptimizerConfig(warmup=0.1), 5000) == 500
    assert warmup_updates(OptimizerConfig(warmup=250), 5000) == 250
    assert warmup_updates(OptimizerConfig(warmup=1), 5000) == 1
    assert warmup_updates(OptimizerConfig(warmup=0), 5000) == 1


def test_a_training_may_end_with_its_warm_up():
    assert rates(updates=1) == [1.0]
    assert rates(updates=4, warmup=4) == [0.25, 0.5, 0.75, 1.0]
