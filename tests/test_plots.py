import pytest
import torch

from asr import plots
from asr.decode.observation import Observation, TimedWord


@pytest.fixture
def observation() -> Observation:
    """Twelve frames in which "hi yo" was heard; one decoder head follows the speech, the other looks everywhere."""
    tokens = ["\u2423hi", "\u2423yo", "<eos>"]
    ctc = torch.full((12, 4), 0.01)
    ctc[:, 0] = 0.97
    ctc[2] = torch.tensor([0.05, 0.0, 0.9, 0.05])
    ctc[8] = torch.tensor([0.1, 0.0, 0.0, 0.9])
    follows = torch.eye(12)[[2, 8, 11]]
    return Observation(
        takes="sound",
        unit="seconds",
        length=0.5,
        frames=(0.02, 0.5),
        features=torch.randn(50, 20),
        source=[],
        text="hi yo",
        tokens=tokens,
        words=[TimedWord("hi", 0.08, 0.13), TimedWord("yo", 0.33, 0.38)],
        symbols=["<blank>", "<1>", "\u2423hi", "\u2423yo"],
        ctc=ctc,
        self_attention=torch.full((2, 2, 12, 12), 1 / 12),
        cross_attention=torch.stack([follows, torch.full((3, 12), 1 / 12)])[None],
        positions=torch.randn(12, 8),
        key_dim=16,
    )


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_spikes_and_words_stand_where_they_were_heard(observation):
    features, ctc, words = plots.sound(observation).axes
    assert texts(ctc) == ["_hi", "_yo"]
    assert [text.get_position()[0] for text in ctc.texts] == pytest.approx([0.02 + 2.5 * 0.04, 0.02 + 8.5 * 0.04])
    assert texts(words) == ["hi", "yo"]
    assert features.get_images()[0].get_array().shape == (20, 50)
    assert words.get_xlim() == (0, 0.5)


def test_cross_attention_is_drawn_token_by_token(observation):
    (axes,) = plots.cross_attention(observation, layer=1, head=1).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["_hi", "_yo", "<eos>"]
    drawn = axes.get_images()[0].get_array()
    assert drawn.argmax(axis=1).tolist() == [2, 8, 11]
    assert axes.get_title() == "cross-attention, decoder layer 1, head 1"


def test_the_tables_hold_every_head(observation):
    entropy, diagonality, cross_entropy, cross_diagonality = plots.heads(observation).axes
    assert texts(entropy) == ["2.48"] * 4  # log 12: even attention
    assert len(texts(diagonality)) == 4
    assert texts(cross_entropy) == ["0.00", "2.48"]
    assert float(texts(cross_diagonality)[0]) > float(texts(cross_diagonality)[1])


def test_every_picture_can_be_written(observation, tmp_path):
    for name, figure in (
        ("sound", plots.sound(observation)),
        ("self", plots.self_attention(observation, 2, 1)),
        ("spread", plots.spread(observation)),
        ("positions", plots.positions(observation)),
    ):
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
