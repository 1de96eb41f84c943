"""Deterministic mode: the same bits whatever the bucket size, the step and the number of ranks."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.hooks import in_dtype, powersgd, total
from paceline.testing import ranks

STEPS = 5
ROWS = 3  # of a micro-batch


class Model(nn.Module):
    """Two blocks with layer norms, and branches of which each micro-batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(
            nn.Linear(7, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 19), nn.Tanh()
        )
        self.branches = nn.ModuleList(nn.Linear(19, 5) for _ in range(2))
        self.never = nn.Linear(19, 5)
        self.head = nn.Linear(19, 5)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        y = self.trunk(x)
        return self.head(y) + self.branches[branch](y)


def micro_batches(step: int, count: int) -> list[torch.Tensor]:
    """Make the whole batch of a step, of numbers of very different sizes."""
    generator = torch.Generator().manual_seed(100 + step)
    batch = torch.randn(count * ROWS, 7, generator=generator)
    return list((batch * torch.randn(count * ROWS, 1, generator=generator).exp()).chunk(count))


def loss_of(model: nn.Module, x: torch.Tensor, step: int, number: int) -> torch.Tensor:
    return model(x, branch=(number // 2 + step) % 2).square().mean()


def accumulate(model: nn.Module, step: int, count: int, rank: int, size: int) -> None:
    """Run the backwards of this rank's micro-batches."""
    each = count // size
    mine = range(rank * each, (rank + 1) * each)
    batches = micro_batches(step, count)
    with paceline.accumulate(model, each):
        for number in mine:
            (loss_of(model, batches[number], step, number) / each).backward()


def train(model: nn.Module, count: int, *, rank: int = 0, size: int = 1, steps: Any = range(STEPS)) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in steps:
        accumulate(model, step, count, rank, size)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def bits(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def gradient_bits(model: nn.Module) -> dict[str, bytes | None]:
    return {n: None if p.grad is None else p.grad.numpy().tobytes() for n, p in model.named_parameters()}


def trained(count: int, group: Any, **arguments: Any) -> bytes:
    """Train a new model over a group, and return its bits, which all ranks of it have."""
    model = paceline.replicate(Model(), group=group, deterministic=True, **arguments)
    train(model, count, rank=group.rank(), size=group.size())
    return bits(model)


@contextlib.contextmanager
def groups() -> Iterator[dict[int, Any]]:
    """Make groups of 1, 2 and 4 ranks, and give each rank those that it is in."""
    torch.set_num_threads(1)
    made = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 4: dist.new_group([0, 1, 2, 3])}
    yield {size: group for size, group in made.items() if dist.get_rank() < size}


@pytest.mark.parametrize("count", [4, 8])
@ranks(4)
def test_one_two_and_four_ranks_come_to_the_same_bits(rank: int, count: int) -> None:
    with groups() as mine:
        seen = {size: trained(count, group) for size, group in mine.items()}

    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, seen)
    assert len({b for of_rank in everyone for b in of_rank.values()}) == 1
    assert [sorted(of_rank) for of_rank in everyone] == [[1, 2, 4], [2, 4], [4], [4]]


@ranks(4)
def test_without_it_another_number_of_ranks_gives_other_bits(rank: int) -> None:
    with groups() as mine:
        seen = set()
        for size, group in mine.items():
            model = paceline.replicate(Model(), group=group)
            train(model, 8, rank=rank, size=size)
            seen.add(bits(model))

    assert rank > 0 or len(seen) == 3


@ranks(4)
def test_bucket_sizes_do_not_show_in_the_bits(rank: int) -> None:
    with groups() as mine:
        assert len({trained(8, mine[4], bucket_mb=mb) for mb in (1e-6, 0.002, 25)}) == 1


@ranks(4)
def test_parts_and_whole_buckets_are_summed_alike(rank: int) -> None:
    from unittest import mock

    import paceline.hooks.fixed_order as fixed_order

    with groups() as mine:
        whole = trained(4, mine[4])
        with mock.patch.object(fixed_order, "WHOLE_NBYTES", 0):
            assert trained(4, mine[4]) == whole


@ranks(2)
def test_a_process_alone_without_a_group_adds_up_by_the_same_tree(rank: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    both = trained(4, dist.group.WORLD)
    alone = Model()
    dist.destroy_process_group()

    paceline.replicate(alone, deterministic=True)
    train(alone, 4)

    assert bits(alone) == both


@ranks(3)
def test_a_sum_has_the_same_bits_on_three_ranks_too(rank: int) -> None:
    torch.set_num_threads(1)
    one = dist.new_group([0])
    seen = set()
    for size, group in ((1, one), (3, dist.group.WORLD)):
        if rank < size:
            model = paceline.replicate(Model(), group=group, deterministic=True, hook=total)
            batches = micro_batches(0, 6)
            each = 6 // size
            with paceline.accumulate(model, each):
                for number in range(rank * each, (rank + 1) * each):
                    (loss_of(model, batches[number], 0, number) / 6).backward()
            seen.add(str(gradient_bits(model)))

    assert len(seen) == 1


@ranks(2)
def test_a_run_that_resumes_in_the_middle_goes_on_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = paceline.replicate(Model(), deterministic=True)
    train(whole, 4, rank=rank, size=2)

    first = paceline.replicate(Model(), deterministic=True)
    optimizer = train(first, 4, rank=rank, size=2, steps=range(2))
    torch.save((first.state_dict(), optimizer.state_dict()), tmp_path / f"{rank}.pt")
    weights, state = torch.load(tmp_path / f"{rank}.pt")
    resumed = Model()
    resumed.load_state_dict(weights)
    paceline.replicate(resumed, deterministic=True, bucket_mb=0.001)
    again = torch.optim.Adam(resumed.parameters(), lr=0.02)
    again.load_state_dict(state)
    for step in range(2, STEPS):
        accumulate(resumed, step, 4, rank, 2)
        again.step()
        again.zero_grad()

    assert bits(resumed) == bits(whole)


@ranks(4)
def test_two_steps_on_the_same_input_have_the_same_gradients(rank: int) -> None:
    torch.set_num_threads(1)
    model = paceline.replicate(Model(), deterministic=True, bucket_mb=0.001)

    seen = []
    for _ in range(3):  # the first plan is a guess, the second one is learned
        accumulate(model, 0, 8, rank, 4)
        seen.append(gradient_bits(model))
        model.zero_grad()

    assert seen[0] == seen[1] == seen[2]


class Twice(nn.Module):
    """A layer under two re-entrant checkpoints: it gets two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 7)
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


@ranks(2)
def test_gradients_that_come_late_have_the_same_bits_in_every_step_and_alone(rank: int) -> None:
    torch.set_num_threads(1)
    one = dist.new_group([0])
    seen = []
    for size, group in ((1, one), (2, dist.group.WORLD)):
        if rank >= size:
            continue
        model = paceline.replicate(Twice(), group=group, deterministic=True, bucket_mb=1e-6)
        batches, each = micro_batches(0, 4), 4 // size
        for _ in range(3):
            with paceline.accumulate(model, each):
                for x in batches[rank * each : (rank + 1) * each]:
                    (model(x).square().mean() / each).backward()
            seen.append(gradient_bits(model))
            model.zero_grad()

    assert all(one == seen[0] for one in seen)


# ---- what .grad holds between the backwards --------------------------------------------------------


def backward(model: nn.Module, number: int) -> None:
    loss_of(model, micro_batches(0, 8)[number], 0, number).backward()


def expected(model: nn.Module, numbers: list[int]) -> dict[str, torch.Tensor | None]:
    """Return the sum of some micro-batches' gradients, as plain torch has it."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    for number in numbers:
        backward(plain, number)
    return {name: p.grad for name, p in plain.named_parameters()}


def assert_gradients(model: nn.Module, numbers: list[int], factor: float = 1.0) -> None:
    for name, gradient in expected(model, numbers).items():
        mine = model.get_parameter(name).grad
        assert (mine is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(mine, gradient * factor, msg=lambda text, name=name: f"{name}: {text}")


def test_between_backwards_the_gradient_shows_the_sum_so_far() -> None:
    model = paceline.replicate(Model(), deterministic=True)

    with paceline.no_sync(model):
        for number in range(7):
            backward(model, number)
            assert_gradients(model, list(range(number + 1)))


CLEARINGS: dict[str, Callable[[nn.Module], None]] = {
    "none": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "by hand": lambda model: [setattr(p, "grad", None) for p in model.parameters()] and None,
}


@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_what_zero_grad_drops_in_the_middle_does_not_come_back(
    clear: Callable[[nn.Module], None], before: int
) -> None:
    model = paceline.replicate(Model(), deterministic=True)
    reference = paceline.replicate(Model(), deterministic=True)
    for number in (4, 5, 6):
        with paceline.no_sync(reference):
            backward(reference, number)
    backward(reference, 7)

    with paceline.no_sync(model):
        for number in range(before):
            backward(model, number)
        clear(model)
        for number in (4, 5, 6):
            backward(model, number)
    backward(model, 7)

    seen, wanted = gradient_bits(model), gradient_bits(reference)
    untouched = {name for name, gradient in wanted.items() if gradient is None}
    assert {n: b for n, b in seen.items() if n not in untouched} == {
        n: b for n, b in wanted.items() if n not in untouched
    }


@ranks(2)
def test_a_gradient_that_was_changed_in_the_middle_is_what_the_rest_is_added_to(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)
    with paceline.no_sync(model):
        for number in range(3):
            backward(model, number)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        backward(model, 4)
    backward(model, 5)

    rest = expected(model, [4, 5])
    for name, gradient in clipped.items():
        added = rest[name] if rest[name] is not None else torch.zeros_like(gradient)
        torch.testing.assert_close(model.get_parameter(name).grad, gradient + added)


@ranks(2)
def test_a_second_reduced_backward_adds_to_what_is_agreed(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True, bucket_mb=1e-6)
    mine = [0, 1, 2, 3] if rank == 0 else [4, 5, 6, 7]

    backward(model, mine[0])
    with paceline.no_sync(model):
        backward(model, mine[1])
    backward(model, mine[2])
    backward(model, mine[3])

    assert_gradients(model, list(range(8)), factor=0.5)


@ranks(2)
def test_a_parameter_that_only_one_rank_adds_to_again_stays_agreed(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)

    backward(model, 0)  # branch 0 on both
    backward(model, 0 if rank == 0 else 2)  # branch 0 on rank 0, branch 1 on rank 1
    backward(model, 0)

    total_of = expected(model, [0, 0, 0, 0, 0, 2])
    for name, gradient in total_of.items():
        if gradient is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, gradient / 2)


@ranks(2)
def test_the_guard_refuses_what_only_this_rank_has(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with paceline.no_sync(model):
        backward(model, 0)
        backward(model, 1)

    with pytest.raises(paceline.UnsyncedGradients, match="trunk.0.weight"):
        optimizer.step()


# ---- failures --------------------------------------------------------------------------------------


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("boom")


def failing_backward(model: Model, number: int) -> None:
    """Raise half way: the head has got its gradient by then."""
    y = Boom.apply(model.trunk(micro_batches(0, 8)[number]))
    model.head(y).square().mean().backward()


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_local_backward_that_raised_has_added_nothing(before: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)
    reference = paceline.replicate(Model(), deterministic=True)

    with paceline.no_sync(model), paceline.no_sync(reference):
        for number in range(before):
            backward(model, number)
            backward(reference, number)
        with pytest.raises(ArithmeticError):
            failing_backward(model, 5)
        assert gradient_bits(model) == gradient_bits(reference)
        backward(model, 6)
        backward(reference, 6)

    assert gradient_bits(model) == gradient_bits(reference)


@ranks(2)
def test_a_step_that_failed_leaves_no_micro_batch_behind(rank: int) -> None:
    torch.set_num_threads(1)
    model = paceline.replicate(Model(), deterministic=True)
    accumulate(model, 0, 8, rank, 2)
    wanted = gradient_bits(model)
    model.zero_grad()

    with paceline.no_sync(model):
        backward(model, 0)
    with pytest.raises(ArithmeticError if rank == 0 else paceline.PeerFailed):
        failing_backward(model, 1) if rank == 0 else backward(model, 1)
    accumulate(model, 0, 8, rank, 2)

    assert gradient_bits(model) == wanted


@ranks(2)
def test_a_block_that_ends_early_reduces_what_is_there(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)

    with paceline.accumulate(model, 4):
        for number in range(3):
            backward(model, number + 4 * rank)

    assert_gradients(model, [0, 1, 2, 4, 5, 6], factor=0.5)


def test_gradients_that_share_memory_are_not_added_to_twice() -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(2, 3)), "b": nn.Parameter(torch.randn(6))})
    paceline.replicate(model, deterministic=True)

    with paceline.no_sync(model):
        for number in range(4):
            (torch.full((6,), float(number)) * (model["a"].view(6) + model["b"])).sum().backward()

    assert model["a"].grad.flatten().tolist() == model["b"].grad.tolist() == [6.0] * 6


def test_a_detached_model_accumulates_as_plain_torch() -> None:
    model = paceline.replicate(Model(), deterministic=True)
    with paceline.no_sync(model):
        backward(model, 0)
    paceline.replica(model).detach()

    backward(model, 1)

    assert_gradients(model, [0, 1])


# ---- what is refused -------------------------------------------------------------------------------


def test_a_hook_without_a_fixed_order_is_refused() -> None:
    with pytest.raises(ValueError, match="deterministic=True and the hook powersgd.* exclude each other"):
        paceline.replicate(Model(), deterministic=True, hook=powersgd(rank=2))
    model = paceline.replicate(Model(), deterministic=True, hook=in_dtype(torch.float64, total))
    with pytest.raises(ValueError, match="exclude each other"):
        paceline.replica(model).set_hook(in_dtype(torch.bfloat16, powersgd(rank=2)))


def test_an_optimizer_inside_backward_is_refused() -> None:
    model = paceline.replicate(Model(), deterministic=True)

    with pytest.raises(ValueError, match="deterministic=True and an optimizer inside backward"):
        paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="these are sparse: weight"):
        paceline.replicate(nn.Embedding(4, 2, sparse=True), deterministic=True)


@ranks(2)
def test_a_sparse_gradient_out_of_the_blue_is_refused_on_every_rank(rank: int) -> None:
    model = paceline.replicate(nn.Embedding(4, 2), deterministic=True)
    loss = nn.functional.embedding(torch.tensor([1]), model.weight, sparse=rank == 0).sum()

    with pytest.raises((ValueError, paceline.PeerFailed), match="these are sparse: weight"):
        loss.backward()


@ranks(2)
def test_ranks_that_do_not_all_ask_for_it_raise(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree, match="the setting deterministic"):
        paceline.replicate(Model(), deterministic=rank == 0)


# ---- weights ---------------------------------------------------------------------------------------

WEIGHTS = [3.0, 0.0, 5.0, 1.0, 7.0, 2.0, 0.0, 4.0]  # of the micro-batches


def weighted(model: nn.Module, rank: int, size: int) -> None:
    """Run this rank's micro-batches, each with its weight."""
    each = 8 // size
    with paceline.accumulate(model, each):
        for number in range(rank * each, (rank + 1) * each):
            with paceline.weight(model, WEIGHTS[number]):
                backward(model, number)


@ranks(4)
def test_weights_have_the_same_bits_on_one_two_and_four_ranks(rank: int) -> None:
    seen = set()
    with groups() as mine:
        for size, group in mine.items():
            model = paceline.replicate(Model(), group=group, deterministic=True)
            weighted(model, rank, size)
            seen.add(str(gradient_bits(model)))

    assert len(seen) == 1
    for name, p in model.named_parameters():
        parts = [(expected(model, [i])[name], w) for i, w in enumerate(WEIGHTS)]
        if p.grad is not None:
            mean = sum(g * w for g, w in parts if g is not None) / sum(WEIGHTS)
            torch.testing.assert_close(p.grad, mean)


@ranks(2)
def test_a_weighted_backward_on_top_of_a_changed_gradient_adds_the_mean_to_it(rank: int) -> None:
    model = paceline.replicate(Model(), deterministic=True)
    with paceline.weight(model, 2.0):
        backward(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with paceline.weight(model, 1.0 + 2 * rank):
        backward(model, rank)  # both on branch 0

    first, second = expected(model, [0]), expected(model, [1])
    for name, gradient in clipped.items():
        mean = (first[name] + 3 * second[name]) / 4
        torch.testing.assert_close(model.get_parameter(name).grad, gradient + mean)


@ranks(2)
def test_a_skipped_micro_batch_keeps_its_place_in_the_tree(rank: int) -> None:
    torch.set_num_threads(1)
    one = dist.new_group([0])
    seen = set()
    for size, group in ((1, one), (2, dist.group.WORLD)):
        if rank >= size:
            continue
        model = paceline.replicate(Model(), group=group, deterministic=True, reduce="sum")
        each = 8 // size
        with paceline.accumulate(model, each):
            for number in range(rank * each, (rank + 1) * each):
                if number in (0, 5):
                    paceline.skip(model)
                else:
                    backward(model, number)
        seen.add(str(gradient_bits(model)))

    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_in_a_graph_stays_one() -> None:
    model = paceline.replicate(nn.Linear(2, 1), deterministic=True)
    with paceline.no_sync(model):
        model(torch.ones(1, 2)).square().sum().backward(create_graph=True)

    assert model.weight.grad.requires_grad


@ranks(2, warnings="ignore")
def test_sums_of_earlier_micro_batches_are_part_of_no_graph(rank: int) -> None:
    torch.manual_seed(0)
    model = paceline.replicate(nn.Linear(3, 2), deterministic=True)
    for step in range(3):
        with paceline.no_sync(model):
            model(torch.ones(2, 3) * (rank + step)).square().sum().backward()
        model(torch.ones(2, 3)).square().sum().backward(create_graph=True)

        assert not any(p.grad is not None and p.grad.requires_grad for p in model.parameters())
        model.zero_grad()
