import itertools
import math

import pytest
import torch

from asr.decode.ctc import CTCPrefixScorer, PrefixScores, ctc_greedy, hears_something
from asr.text.tokenizer import BLANK, EOS


def textbook(log_probs: torch.Tensor, prefix: list[int]) -> tuple[float, float]:
    """Log-probabilities that the transcript starts with `prefix`, and that it is `prefix` (Watanabe et al. 2017,
    algorithm 2): one loop over frames for each label of the prefix."""
    p = log_probs.double().exp().tolist()
    T = len(p)
    label, blank = [0.0] * (T + 1), [1.0] + [0.0] * T
    for t in range(T):
        blank[t + 1] = blank[t] * p[t][BLANK]
    starts, last = 1.0, None
    for c in prefix:
        before = [blank[t] + (0.0 if c == last else label[t]) for t in range(T + 1)]
        new_label, new_blank = [0.0] * (T + 1), [0.0] * (T + 1)
        for t in range(T):
            new_label[t + 1] = (new_label[t] + before[t]) * p[t][c]
            new_blank[t + 1] = (new_blank[t] + new_label[t]) * p[t][BLANK]
        starts = sum(before[t] * p[t][c] for t in range(T))
        label, blank, last = new_label, new_blank, c
    ends = label[T] + blank[T]
    return math.log(starts), math.log(ends) if ends else -math.inf


def continued(scores: PrefixScores) -> torch.Tensor:
    """Log-probabilities `(B, W, V)` of the prefixes followed by each token."""
    return scores.base + scores.gains


def merge(path) -> list[int]:
    return [c for c, _ in itertools.groupby(path) if c != BLANK]


@pytest.mark.parametrize("prefix", [[], [4], [4, 4], [4, 5, 4], [5, 5, 5], [6, 4, 4, 5]])
def test_prefix_scores_equal_the_textbooks_recursion(prefix):
    lens = torch.tensor([12, 9])
    log_probs = torch.randn(2, 12, 8).mul(2).log_softmax(dim=-1)
    scorer = CTCPrefixScorer.of(log_probs, lens)
    state = scorer.start(3)
    for token in prefix:
        parents = torch.tensor([[2, 0, 1]] * 2)
        state = scorer.advance(state, parents, torch.full((2, 3), token))
    scores = scorer.score(state)
    for b in range(2):
        own = log_probs[b, : lens[b]]
        for w in range(3):
            for c in range(4, 8):
                assert continued(scores)[b, w, c].item() == pytest.approx(textbook(own, [*prefix, c])[0], abs=1e-5)
            assert scores.ended[b, w].item() == pytest.approx(textbook(own, prefix)[1], abs=1e-5)
            assert scores.gains[b, w, [BLANK, EOS]].isneginf().all()


def confident(labels: dict[int, int], frames: int, nats: float = 9.0) -> torch.Tensor:
    """Log-probabilities `(1, frames, 8)` of a CTC that is sure of a label at some frames and of blanks elsewhere."""
    path = torch.zeros(frames, dtype=torch.long)
    path[list(labels)] = torch.tensor(list(labels.values()))
    noise = torch.randn(frames, 8, generator=torch.Generator().manual_seed(3))
    return (torch.nn.functional.one_hot(path, 8) * nats + noise).log_softmax(dim=-1)[None]


def test_the_window_follows_the_hypotheses():
    labels = [4, 5, 6, 4, 7, 5, 6, 4, 5]
    early, late = [10, 14, 20, 80, 84, 90, 150, 152, 160], [40, 44, 50, 90, 100, 120, 170, 175, 180]
    log_probs = torch.cat([confident(dict(zip(frames, labels, strict=True)), 460, 90.0) for frames in (early, late)])
    exact = scorer = CTCPrefixScorer.of(log_probs, torch.tensor([460, 200]))
    whole, state, windows = exact.start(1), scorer.start(1), []
    for label in [*labels, None]:
        scorer, state = scorer.follow(state, 4)
        windows.append((scorer.begin, scorer.end))
        found, right = scorer.score(state), exact.score(whole)
        assert torch.allclose(continued(found), continued(right), atol=0.01)
        assert torch.allclose(found.ended.exp(), right.ended.exp(), rtol=1e-4)
        if label:
            step = torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), label)
            whole, state = exact.advance(whole, *step), scorer.advance(state, *step)
    assert windows[0][0] == 0 and windows[0][1] < 460
    assert windows[-1] == (160, 460)
    assert windows == sorted(windows)


def test_the_window_reaches_across_a_pause_whatever_its_length():
    log_probs = confident({10: 4, 2900: 5}, 3000)
    log_probs[0, 20:2890] = torch.tensor([0.0, *[-30.0] * 7])
    scorer = CTCPrefixScorer.of(log_probs, torch.tensor([3000]))
    scorer, state = scorer.follow(scorer.start(1), 4)
    for label in (4, 5):
        assert continued(scorer.score(state)).argmax() == label
        state = scorer.advance(state, torch.zeros(1, 1, dtype=torch.long), torch.tensor([[label]]))


def test_the_window_holds_the_hindmost_hypothesis_and_the_foremost():
    log_probs = confident({10: 4, 20: 5, 30: 6, 40: 7, 50: 4, 60: 5}, 100, 90.0)
    log_probs[0, [10, 20], BLANK] = log_probs[0, [10, 20], [4, 5]] = math.log(0.5)
    exact = CTCPrefixScorer.of(log_probs, torch.tensor([100]))
    said = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[4, 6]])  # the second has left out the doubtful labels
    whole = exact.advance(exact.start(2), *said)
    scorer, state = exact.follow(whole, 1)
    assert scorer.begin == 10 and 40 < scorer.end < 100
    found, right = continued(scorer.score(state)), continued(exact.score(whole))
    torch.testing.assert_close(found[0, [0, 1], [5, 7]], right[0, [0, 1], [5, 7]])


def test_what_ctc_hears_in_the_padding_does_not_move_the_window():
    log_probs = confident({40: 4}, 100, 30.0)
    log_probs[0, [5, 10], [4, 6]] = -10.0
    said = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[4]])
    alone, padded = (CTCPrefixScorer.of(log_probs[:, :size], torch.tensor([20])) for size in (20, 100))
    right = alone.score(alone.advance(alone.start(1), *said))
    scorer, state = padded.follow(padded.advance(padded.start(1), *said), 1)
    assert scorer.begin <= 5
    torch.testing.assert_close(continued(scorer.score(state))[0, 0, 6], continued(right)[0, 0, 6])
    torch.testing.assert_close(scorer.score(state).ended, right.ended)


def test_where_a_window_grows_there_are_blanks_behind_all_prefixes():
    exact = CTCPrefixScorer.of(confident({10: 4, 20: 5, 30: 6, 40: 7}, 50, 90.0), torch.tensor([50]))
    short, state = exact.follow(exact.start(1), 1)
    grown, state = short.follow(state, 2)
    assert short.end < grown.end
    for found, right in ((state.total, grown.start(1).total), (state.blank, grown.start(1).blank)):
        torch.testing.assert_close(found, right)  # the empty prefix has only blanks in any case


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("nats", [30.0, 90.0, 270.0])
@pytest.mark.parametrize("held", [1, 3, 8])
def test_a_window_holds_what_comes_until_it_moves(held, nats, steps):
    path = [4, 5, 6, 5, 7] * 12
    places = {10 + i * held + k: label for i, label in enumerate(path) for k in range(held)}  # without gaps
    log_probs = confident(places, 600, nats)
    exact = scorer = CTCPrefixScorer.of(log_probs, torch.tensor([600]))
    whole, state = exact.start(1), scorer.start(1)
    for step, label in enumerate(path):
        if step % steps == 0:
            scorer, state = scorer.follow(state, steps)
        if step < 15:  # the window reaches the end once all remaining labels are near
            assert scorer.end < 10 + (step + 80 * steps / nats + 2 * steps) * held < 600
        found, right = (continued(s)[0, 0] for s in (scorer.score(state), exact.score(whole)))
        assert found.argmax() == right.argmax() == label
        assert found[label].item() == pytest.approx(right[label].item(), abs=0.01)
        token = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[label]])
        whole, state = exact.advance(whole, *token), scorer.advance(state, *token)
    assert scorer.score(state).ended.item() == pytest.approx(exact.score(whole).ended.item(), abs=0.01)


def test_the_score_of_a_prefix_sums_over_all_paths():
    log_probs = torch.randn(1, 5, 6).log_softmax(dim=-1)
    scorer = CTCPrefixScorer.of(log_probs, torch.tensor([5]))
    state = scorer.advance(scorer.start(1), torch.zeros(1, 1, dtype=torch.long), torch.tensor([[4]]))
    scores = scorer.score(state)
    paths = [
        (merge(path), sum(log_probs[0, t, c].item() for t, c in enumerate(path)))
        for path in itertools.product(range(6), repeat=5)
    ]
    exact = math.log(sum(math.exp(s) for labels, s in paths if labels == [4]))
    starting = math.log(sum(math.exp(s) for labels, s in paths if labels[:2] == [4, 5]))
    assert scores.ended.item() == pytest.approx(exact, abs=1e-5)
    assert continued(scores)[0, 0, 5].item() == pytest.approx(starting, abs=1e-5)


def test_long_confident_input_neither_under_nor_overflows():
    log_probs = torch.full((1, 3000, 10), -60.0)
    log_probs[..., BLANK] = 0.0
    log_probs[0, 1500, 4] = 0.0
    log_probs[0, 1500, BLANK] = -60.0
    scorer = CTCPrefixScorer.of(log_probs, torch.tensor([3000]))
    scores = scorer.score(scorer.start(1))
    assert torch.isfinite(continued(scores)[..., 4:]).all()
    assert continued(scores)[0, 0, 4].item() == pytest.approx(0.0, abs=1e-3)
    state = scorer.advance(scorer.start(1), torch.zeros(1, 1, dtype=torch.long), torch.tensor([[4]]))
    assert scorer.score(state).ended.item() == pytest.approx(0.0, abs=1e-3)


def test_the_greedy_path_merges_repeats_and_drops_blanks():
    path = torch.tensor([[4, 4, 0, 4, 5, 5, 0, 6], [5, 0, 0, 6, 6, 6, 6, 6]])
    log_probs = torch.nn.functional.one_hot(path, 8).double().mul(10).log_softmax(dim=-1)
    found = ctc_greedy(log_probs, torch.tensor([8, 3]))
    assert [best[0].tokens for best in found] == [[4, 4, 5, 6], [5]]
    frame = log_probs.max().item()  # all frames are equally sure
    assert [best[0].score for best in found] == pytest.approx([8 * frame, 3 * frame])
    assert [best[0].token_scores for best in found] == [pytest.approx([frame] * n) for n in (4, 1)]


def test_something_is_heard_where_a_label_is_likelier_than_the_blank_and_not_one_of_many():
    nothing, vague, sure = [0.9, *[0.01] * 10], [0.1, *[0.09] * 8, 0.18, 0.0], [0.3, 0.6, *[0.0125] * 8, 0.0]
    frames = [[nothing, nothing, nothing], [vague, nothing, vague], [nothing, sure, nothing], [nothing, nothing, sure]]
    found = hears_something(torch.tensor(frames).log(), torch.tensor([3, 3, 3, 2]))
    assert found.tolist() == [False, False, True, False]  # the last utterance has its label in the padding
