import numpy as np
import pytest

from asr.decode.options import DecodeOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": "5"}, "beam_size is int, not '5'"),
        ({"beam_size": 5.0}, "beam_size is int, not 5.0"),
        ({"nbest": True}, "nbest is int, not True"),
        ({"ctc_weight": None}, "ctc_weight is float, not None"),
        ({"strategy": 1}, "strategy is str, not 1"),
        ({"phrases": [5]}, r"phrases is a tuple of str, not \(5,\)"),
        ({"phrases": None}, "phrases is a tuple of str, not None"),
        ({"fallback": 0.2}, "fallback is a tuple of float, not 0.2"),
    ],
)
def test_an_option_of_another_type_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        DecodeOptions(**options)


def test_several_may_come_in_any_way_and_numbers_from_numpy():
    options = DecodeOptions(
        beam_size=np.int64(3),
        lm_weight=1,
        ctc_weight=np.float32(0.5),
        phrases=["Ada", "Grace"],
        fallback=(x for x in (np.float32(0.5), 1)),
    )
    assert options.phrases == ("Ada", "Grace") and options.fallback == (0.5, 1)
    assert DecodeOptions(phrases="Ada").phrases == ("Ada",)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "greedy", "temperature": float("nan")},
        {"strategy": "greedy", "temperature": float("inf")},
        {"fallback": [float("nan")]},
        {"ctc_weight": float("nan")},
        {"lm_weight": float("nan")},
        {"length_bonus": float("nan")},
    ],
)
def test_what_is_no_number_is_refused(options):
    with pytest.raises(ValueError, match="|".join(options)):
        DecodeOptions(**options)
