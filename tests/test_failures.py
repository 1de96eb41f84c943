"""Failures and odd cases: every rank learns of them, and nothing half-reduced is used."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.comm import Comm, GroupComm, Pending
from paceline.control import control_over
from paceline.hooks import GradBucket, surely
from paceline.testing import ranks


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x: torch.Tensor, text: str = "boom") -> torch.Tensor:
        _ctx.text = text
        return x.clone()

    @staticmethod
    def backward(ctx, _gradient: torch.Tensor):
        raise ValueError(ctx.text)


def ones(rank: int, width: int = 4) -> torch.Tensor:
    return torch.full((1, width), rank + 1.0)


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def goes_on(rank: int, *models: nn.Module) -> None:
    for model in models:
        model.zero_grad()
        model(ones(rank)).sum().backward()
        assert (model.weight.grad == 1.5).all()


@ranks(2)
def test_two_replicas_that_fail_at_the_loss_are_both_settled(rank: int) -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    for part in (a, b):
        paceline.replicate(part)
    loss = b(a(ones(rank))).sum()

    seen = outcome_of((Boom.apply(loss) if rank == 0 else loss).backward)

    assert seen.startswith("ValueError: boom" if rank == 0 else "PeerFailed: step 0: rank 0 raised")
    goes_on(rank, a, b)


@ranks(2)
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "closure"])
def test_a_failure_before_re_entrant_checkpoints_is_told(rank: int, wrapped: bool) -> None:
    model = paceline.replicate(nn.Linear(4, 4))
    run = (lambda x: model(x)) if wrapped else model
    loss = checkpoint(run, ones(rank).requires_grad_(), use_reentrant=True).sum()

    seen = outcome_of((Boom.apply(loss) if rank == 0 else loss).backward)

    assert seen.startswith("ValueError: boom" if rank == 0 else "PeerFailed: step 0: rank 0 raised")
    goes_on(rank, model)


@ranks(2)
def test_an_exception_inside_an_accumulate_block_is_told(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4))

    def step() -> None:
        with paceline.accumulate(model, 2):
            model(ones(rank)).sum().backward()
            if rank == 0:
                raise KeyError("no such batch")
            model(ones(rank)).sum().backward()

    seen = outcome_of(step)

    assert seen == "KeyError: 'no such batch'" if rank == 0 else "rank 0 raised in its loop" in seen
    goes_on(rank, model)


@ranks(2)
def test_a_failure_after_the_closing_frame_stops_every_rank_at_the_next_backward(rank: int) -> None:
    class Late(Pending):
        def wait(self) -> torch.Tensor:
            raise MemoryError("no room")

    @surely
    def hook(bucket: GradBucket, comm: Comm) -> Pending:
        pending = comm.average(bucket.flat)
        return Late(pending.wait()) if comm.rank == 0 else pending

    model = paceline.replicate(nn.Linear(4, 4), hook=hook)
    first = outcome_of(model(ones(rank)).sum().backward)
    second = outcome_of(model(ones(rank)).sum().backward)

    assert first == ("MemoryError: no room" if rank == 0 else "fine")
    assert "rank 0 raised during its backward: this rank failed while gradients were handed out" in second


@ranks(2)
def test_a_text_that_is_not_unicode_is_told(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4))
    loss = model(ones(rank)).sum()

    seen = outcome_of((Boom.apply(loss, "bad \udcff") if rank == 0 else loss).backward)

    assert rank == 0 or "bad \\udcff" in seen
    goes_on(rank, model)


@ranks(2)
def test_a_backward_with_inputs_that_fails_concerns_only_those(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4))
    x = ones(rank).requires_grad_()
    if rank == 0:
        with pytest.raises(ValueError, match="boom"):
            model(Boom.apply(x)).sum().backward(inputs=[x])

    goes_on(rank, model)


@ranks(2)
def test_a_disagreement_about_what_is_trained_can_be_mended(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    paceline.replicate(model)
    model[0].requires_grad_(rank == 0)
    seen = outcome_of(model(ones(rank)).sum().backward)
    assert seen.startswith("RanksDisagree: step 0: the ranks would send different buckets")
    assert "0.weight" in seen

    model[0].requires_grad_(False)
    model(ones(rank)).sum().backward()

    assert model[1].weight.grad is not None
    assert model[0].weight.grad is None


@ranks(2)
@pytest.mark.parametrize("setting", ["unused", "buffers"])
def test_settings_that_differ_are_refused_at_the_start(rank: int, setting: str) -> None:
    values = {"unused": ("allow", "error"), "buffers": ("after_backward", "start")}[setting]

    seen = outcome_of(lambda: paceline.replicate(nn.Linear(4, 4), **{setting: values[rank]}))

    assert f"the setting {setting} is" in seen
    assert "on rank 0 but" in seen


@ranks(2)
def test_frames_longer_than_a_mailbox_do_not_block(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    control.post(b"long", bytes([rank]) * 1_000_000)

    assert control.collect(b"long", 20) == [bytes([r]) * 1_000_000 for r in range(2)]


# ---- gradients that are easy to get wrong -----------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, 1e-9])
@pytest.mark.parametrize("numel", [16, 40_000])
def test_two_parameters_whose_gradients_share_memory(rank: int, bucket_mb: float, numel: int) -> None:
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.zeros(numel // 2, 2)) for _ in range(2))
    paceline.replicate(model, bucket_mb=bucket_mb)

    for _ in range(3):
        model.zero_grad()
        ((model.a.view(-1) + model.b.view(-1)) * (rank + 1)).sum().backward()
        assert (model.a.grad == 1.5).all()
        assert (model.b.grad == 1.5).all()


@ranks(2)
def test_create_graph_with_one_parameter_per_bucket(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4), bucket_mb=1e-9)

    with pytest.warns(UserWarning, match="create_graph"):
        model(ones(rank)).square().sum().backward(create_graph=True)
        model.weight.grad.square().sum().backward()

    parts = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(parts, model.weight.grad.detach().clone())
    assert torch.equal(*parts)


@ranks(2)
def test_local_gradients_that_were_dropped_do_not_count_as_used(rank: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    paceline.replicate(model)
    with paceline.no_sync(model):
        (model["a"](ones(rank)) + model["b"](ones(rank))).sum().backward()
    model.zero_grad()

    model["a"](ones(rank)).sum().backward()

    assert model["b"].weight.grad is None


@ranks(2)
def test_an_optimizer_step_in_the_hook_of_the_first_gradient_is_refused(rank: int) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    paceline.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    seen = outcome_of((model.weight * (rank + 1)).sum().backward)

    assert "still running: step after it" in seen
    assert (model.weight == 1).all()


@ranks(2)
def test_a_parameter_frozen_again_before_its_backward_is_left_alone(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    paceline.replicate(model)
    model[0].requires_grad_(True)
    loss = model(ones(rank)).sum()
    model[0].requires_grad_(False)

    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


@ranks(2)
def test_conjugated_gradients(rank: int) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    paceline.replicate(model)

    (model.weight.conj() * torch.tensor(1j) * (rank + 1)).real.sum().backward()

    alone = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    (alone.conj() * torch.tensor(1j) * 1.5).real.sum().backward()
    torch.testing.assert_close(model.weight.grad, alone.grad.resolve_conj())


@ranks(2)
def test_expanded_parameters_are_refused_by_name(rank: int) -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(1).expand(5))

    seen = outcome_of(lambda: paceline.replicate(model))

    assert seen == "ValueError: wide use the same memory for several elements; clone() them first"


@ranks(2)
def test_replicas_on_different_groups_have_different_names(rank: int) -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    paceline.replicate(a)
    paceline.replicate(b, group=dist.new_group([0, 1]))

    b(a(ones(rank))).sum().backward()

    assert paceline.replica(a).name != paceline.replica(b).name
    assert a.weight.grad is not None


@ranks(2)
def test_a_hook_that_raises_on_an_empty_bucket_as_well_leaves_the_ranks_connected(rank: int) -> None:
    class Sulky(Pending):
        def __init__(self, pending: Pending, *, is_empty: bool) -> None:
            self._pending, self._is_empty = pending, is_empty

        def wait(self) -> torch.Tensor:
            flat = self._pending.wait()
            if self._is_empty:
                raise ValueError("nothing to look at")
            return flat

    def hook(bucket: GradBucket, comm: Comm) -> Pending:
        return Sulky(comm.average(bucket.flat), is_empty=not bucket.flat.any())

    model = paceline.replicate(nn.Linear(4, 4), hook=hook)
    loss = model(ones(rank)).sum()

    seen = outcome_of((Boom.apply(loss, "boom") if rank == 0 else loss).backward)

    assert seen.startswith("ValueError: boom" if rank == 0 else "PeerFailed: step 0: rank 0 raised")
    goes_on(rank, model)
