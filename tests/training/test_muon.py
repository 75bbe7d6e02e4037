import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

import asr.training.muon
from asr.training.base import Training
from asr.training.muon import QUINTICS, Muon, orthogonalized
from asr.training.run import train
from tests.training.tones import options

SHAPES = [(24, 24), (24, 40), (40, 24), (24, 24)]


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(16, 16), (16, 64)])
def test_a_matrix_keeps_its_singular_vectors_and_gets_singular_values_near_one(shape, precision, monkeypatch):
    monkeypatch.setattr(asr.training.muon, "best_precision", lambda device: precision)
    M = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    U, _, V = torch.linalg.svd(M, full_matrices=False)
    found = orthogonalized(M)
    assert found.dtype == getattr(torch, precision)  # the type that is fast on the hardware
    among_them = U.mT @ found.float() @ V.mT
    values = among_them.diagonal(dim1=1, dim2=2)
    assert values.min() > 0.5 and values.max() < 1.3
    assert (among_them - torch.diag_embed(values)).abs().max() < 0.1


def test_singular_values_from_a_300th_of_the_largest_on_end_within_a_quarter_of_one():
    values = torch.logspace(-2.52, 0, 1000, dtype=torch.float64)
    for a, b, c in QUINTICS:
        values = a * values + b * values**3 + c * values**5
    assert values.min() > 0.75 and values.max() < 1.25


def parameters(shapes=SHAPES) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=draw)


def muon(matrices: list[nn.Parameter], biases: list[nn.Parameter]) -> Muon:
    return Muon(matrices, [{"params": biases, "weight_decay": 0.0}], weight_decay=0.1, lr=0.02, fused=True)


def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw(monkeypatch):
    monkeypatch.setattr(asr.training.muon, "QUINTICS", [(3.4445, -4.7750, 2.0315)] * 5)  # torch's coefficients
    ours, theirs = parameters([*SHAPES, (24,)]), parameters([*SHAPES, (24,)])
    optimizer = muon(ours[:-1], ours[-1:])
    references = [
        torch.optim.Muon(theirs[:-1], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[-1:], lr=0.02, weight_decay=0.0, fused=True),
    ]
    for step in range(5):
        for optimizers, its in (([optimizer], ours), (references, theirs)):
            give_gradients(its, step)
            for each in optimizers:
                each.step()
    start = parameters([*SHAPES, (24,)])
    for p, q, before in zip(ours[:-1], theirs[:-1], start[:-1], strict=True):
        assert (p - q).norm() < 0.02 * (q - before).norm()  # both round to bfloat16
    assert torch.equal(ours[-1], theirs[-1])


def test_an_update_whose_gradients_are_not_finite_is_left_out():
    whole, broken = parameters(), parameters()
    two = muon(whole, []), muon(broken, [])
    for step in range(3):
        give_gradients(whole, step)
        two[0].step()
    for step in (0, None, 1, 2):
        give_gradients(broken, step or 0)
        if step is None:
            broken[0].grad[0, 0], broken[1].grad[0, 0] = torch.nan, torch.inf
        two[1].found_inf = torch.tensor(float(step is None))
        two[1].step()
    assert all(torch.equal(p, q) for p, q in zip(whole, broken, strict=True))


def test_what_is_saved_goes_on_alike():
    whole = parameters([*SHAPES, (24,)])
    optimizer = muon(whole[:-1], whole[-1:])
    give_gradients(whole, 0)
    optimizer.step()
    again = copy.deepcopy(whole)
    resumed = muon(again[:-1], again[-1:])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for its, each in ((whole, optimizer), (again, resumed)):
        give_gradients(its, 1)
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(whole, again, strict=True))


def stepped(rank: int, folder: Path) -> None:
    """Saves the matrices after three steps, and how many this process orthogonalised per call."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    matrices = []
    asr.training.muon.orthogonalized = lambda M: matrices.append(len(M)) or orthogonalized(M)
    torch.save((after_three_steps(), matrices), folder / f"{rank}.pt")
    dist.destroy_process_group()


def after_three_steps() -> list[torch.Tensor]:
    moved = parameters([*SHAPES, (24, 24)])
    optimizer = muon(moved, [])
    for step in range(3):
        give_gradients(moved, step)
        optimizer.step()
    return [p.detach() for p in moved]


def test_two_processes_each_orthogonalise_a_share(tmp_path):
    start_processes(stepped, (tmp_path,), nprocs=2, start_method="fork")
    for rank in range(2):
        moved, matrices = torch.load(tmp_path / f"{rank}.pt")
        assert matrices == 3 * [2, 1, 1]  # from groups of three, one and one
        torch.testing.assert_close(moved, after_three_steps())


def test_a_training_has_it_for_the_layers_matrices_that_learn(corpus, tmp_path, monkeypatch):
    made = []
    configure = Training.configure_optimizers

    def configured(self):
        made.append((self, configure(self)["optimizer"]))
        return configure(self)

    monkeypatch.setattr(Training, "configure_optimizers", configured)
    folder, _ = train(options(corpus, tmp_path / "first", "epochs=1"))
    settings = ["epochs=1", "optimizer.kind=muon", f"init_from={folder}", "freeze_layers=1"]
    train(options(corpus, tmp_path / "second", *settings))
    (_, adamw), (module, optimizer) = made
    assert type(adamw) is torch.optim.AdamW and type(optimizer) is Muon
    names = {p: name for name, p in module.named_parameters()}
    matrices, *rest = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert all(".layers." in name and name.endswith("weight") for name in matrices)
    assert not any(".encoder.layers.0." in name for name in matrices)
    assert sorted([*matrices, *rest[0], *rest[1]]) == sorted(names[p] for p in names if p.requires_grad)
    assert {"model.transformer.decoder.embedding.weight", "model.transformer.ctc.weight"} <= {*rest[0]}


@pytest.mark.parametrize(
    ("settings", "what"),
    [(["optimizer.kind=sgd"], "optimizer.kind"), (["optimizer.kind=muon", "strategy=fsdp"], "fsdp")],
)
def test_what_cannot_be_is_refused(corpus, tmp_path, settings, what):
    with pytest.raises(ValueError, match=what):
        options(corpus, tmp_path, *settings)
