"""Local SGD: weights are averaged when it is time, among whom it is time for, and otherwise not."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import paceline
from paceline.comm import comm_over
from paceline.hooks import average_parameters, is_sure, local_sgd, name_of
from paceline.hooks.averaging import Anchors
from paceline.testing import ranks
from tests.hooks.world import World

HALF = torch.bfloat16


def model_of(rank: int = 0) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(rank: int, count: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * count + rank))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everyones(model: nn.Module) -> torch.Tensor:
    """Return a row of weights for each rank."""
    return comm_over(None).gather(flat(model)).wait()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    model(batch(rank, count)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class ByHand:
    """All ranks in one process: plain models, averaged when the test says so."""

    def __init__(self, size: int) -> None:
        self.models = [model_of() for _ in range(size)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]

    def train(self, count: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train(model, optimizer, rank, count)

    @torch.no_grad()
    def average(self, among: int) -> None:
        for first in range(0, len(self.models), among):
            group = self.models[first : first + among]
            for parameters in zip(*(m.parameters() for m in group), strict=True):
                mean = torch.stack(list(parameters)).mean(dim=0)
                for parameter in parameters:
                    parameter.copy_(mean)


def check_against_hand(rank: int, size: int, hook: Any, averages: dict[int, int], steps: int) -> None:
    """Train on all ranks; ``averages`` tells after which step how many ranks come together."""
    model = paceline.replicate(model_of(), hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hand = ByHand(size)
    for count in range(1, steps + 1):
        train(model, optimizer, rank, count)
        hand.train(count)
        if count in averages:
            hand.average(averages[count])
        torch.testing.assert_close(
            flat(model), flat(hand.models[rank]), msg=lambda m, c=count: f"step {c}: {m}"
        )


@ranks(2)
def test_weights_are_averaged_after_every_third_step(rank: int) -> None:
    check_against_hand(rank, 2, local_sgd(every=3), {3: 2, 6: 2}, steps=7)


@ranks(4)
def test_neighbours_are_averaged_more_often(rank: int) -> None:
    hook = local_sgd(hierarchy={2: 2, 4: 4})
    check_against_hand(rank, 4, hook, {2: 2, 4: 4, 6: 2, 8: 4, 10: 2}, steps=11)


@ranks(4)
def test_every_completes_a_hierarchy(rank: int) -> None:
    hook = local_sgd(every=4, hierarchy={2: 2})
    check_against_hand(rank, 4, hook, {2: 2, 4: 4, 6: 2}, steps=7)


@ranks(4)
def test_a_hierarchy_that_begins_with_one_averages_gradients_among_neighbours(rank: int) -> None:
    model = paceline.replicate(model_of(), hook=local_sgd(every=2, hierarchy={1: 2}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train(model, optimizer, rank, 1)
    rows = everyones(model)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert not torch.equal(rows[0], rows[2])

    train(model, optimizer, rank, 2)
    rows = everyones(model)
    assert all(torch.equal(rows[0], row) for row in rows)


@ranks(2)
def test_the_first_steps_average_gradients(rank: int) -> None:
    model = paceline.replicate(model_of(), hook=local_sgd(every=2, start_step=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    equal = []
    for count in range(8):
        train(model, optimizer, rank, count)
        rows = everyones(model)
        equal.append(torch.equal(rows[0], rows[1]))

    assert equal == [True, True, True, False, True, False, True, False]


@ranks(2)
def test_each_optimizer_averages_its_own_parameters_at_its_own_pace(rank: int) -> None:
    model = paceline.replicate(model_of(), hook=local_sgd(every=2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    bystander = torch.optim.SGD(other.parameters(), lr=0.1)

    equal = []
    for count in range(4):
        model(batch(rank, count)).square().mean().backward()
        first.step()
        bystander.step()
        if count % 2:
            second.step()
        model.zero_grad()
        rows = [everyones(part) for part in (model[0], model[2])]
        equal.append([torch.equal(*pair) for pair in rows])

    assert equal == [[False, True], [True, False], [False, False], [True, True]]


@ranks(2)
def test_an_optimizer_inside_an_optimizer_counts_once(rank: int) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = paceline.replicate(model_of(), hook=local_sgd(every=2))
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))

    equal = []
    for count in range(4):
        train(model, optimizer, rank, count)
        rows = everyones(model)
        equal.append(torch.equal(rows[0], rows[1]))

    assert equal == [False, True, False, True]


@ranks(2)
def test_an_average_is_one_message_for_each_dtype(rank: int) -> None:
    comm, sent = comm_over(None), []
    average = comm.average
    comm.average = lambda tensor: sent.append((tensor.dtype, tensor.numel())) or average(tensor)
    tensors = [
        torch.full((2, 3), rank + 1.0),
        torch.full((5,), rank + 1.0, dtype=torch.bfloat16),
        torch.full((4,), rank + 1.0),
        torch.full((2,), 1j * (rank + 1)),
    ]

    average_parameters(tensors, comm)

    assert sent == [(torch.float32, 10), (torch.float32, 5), (torch.complex64, 2)]
    assert [tensor.flatten()[0].item() for tensor in tensors] == [1.5, 1.5, 1.5, 1.5j]


@ranks(3)
def test_small_weights_in_16_bits_survive_many_averages(rank: int) -> None:
    weight = torch.randn(100, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = weight.clone()

    for _ in range(10):
        average_parameters([weight], comm_over(None))

    assert torch.equal(weight, before)


@ranks(2)
def test_unusual_strides_are_averaged_in_place(rank: int) -> None:
    tensor = torch.arange(6.0).view(2, 3).t() + rank
    address = tensor.data_ptr()

    average_parameters([tensor], comm_over(None))

    assert torch.equal(tensor, torch.arange(6.0).view(2, 3).t() + 0.5)
    assert tensor.data_ptr() == address


@ranks(2)
def test_the_average_can_be_asked_for_before_saving(rank: int) -> None:
    hook = local_sgd(every=100)
    model = paceline.replicate(model_of(), hook=hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)
    before = everyones(model)
    assert not torch.equal(before[0], before[1])

    hook.average_now()

    after = everyones(model)
    assert torch.equal(after[0], after[1])
    torch.testing.assert_close(after[0], before.mean(dim=0))


@ranks(2)
def test_moves_travel_in_16_bits_and_weights_stay_near_the_exact_average(rank: int) -> None:
    exact, ours = (
        paceline.replicate(model_of(), hook=hook) for hook in (local_sgd(2), local_sgd(2, dtype=HALF))
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (exact, ours)]
    sent = spy_on_averages(paceline.replica(ours).comm)
    for count in range(8):
        for model, optimizer in zip((exact, ours), optimizers, strict=True):
            train(model, optimizer, rank, count)

    everyone = everyones(ours)
    assert torch.equal(everyone[0], everyone[1])
    assert sent == [torch.float32, HALF, HALF, HALF]  # the first time there is nothing to have moved from
    moved = (flat(exact) - flat(model_of())).norm()
    assert 0 < (flat(ours) - flat(exact)).norm() < 0.01 * moved


def spy_on_averages(comm: Any) -> list[torch.dtype]:
    sent, average = [], comm.average
    comm.average = lambda tensor: sent.append(tensor.dtype) or average(tensor)
    return sent


@ranks(2)
def test_small_moves_of_large_weights_are_not_lost_in_16_bits(rank: int) -> None:
    weight, anchors = torch.full((4,), 1000.0), Anchors(HALF)
    named = [("weight", weight)]
    anchors.average(named, comm_over(None))

    for _ in range(10):
        weight += 0.25 * (rank + 1)
        anchors.average(named, comm_over(None))

    assert weight.tolist() == [1000.0 + 10 * 0.375] * 4


@ranks(2)
def test_numbers_that_16_bits_would_not_shrink_are_averaged_as_they_are(rank: int) -> None:
    tensors = {"half": torch.full((2,), rank + 1.0, dtype=HALF), "complex": torch.full((2,), 1j * (rank + 1))}
    anchors = Anchors(HALF)

    for _ in range(2):
        anchors.average(list(tensors.items()), comm_over(None))

    assert not anchors.by_name
    assert [tensor[0].item() for tensor in tensors.values()] == [1.5, 1.5j]


@ranks(4)
def test_only_the_average_of_all_ranks_is_of_moves(rank: int) -> None:
    hook = local_sgd(hierarchy={1: 2, 2: 4}, dtype=HALF)
    model = paceline.replicate(model_of(), hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for count in range(4):
        train(model, optimizer, rank, count)

    everyone = everyones(model)
    assert all(torch.equal(row, everyone[0]) for row in everyone)
    assert hook._anchors.by_name.keys() == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@ranks(2)
def test_a_saved_state_goes_on_where_it_was(rank: int, dtype: torch.dtype | None) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        hook = local_sgd(every=3, start_step=1, dtype=dtype)
        model = paceline.replicate(model_of(), hook=hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), hook

    model, optimizer, hook = start()
    for count in range(5):
        train(model, optimizer, rank, count)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), hook.state_dict()])
    for count in range(5, 10):
        train(model, optimizer, rank, count)
    for _ in range(2):  # what was saved can be loaded again
        again, optimizer, hook = start()
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's own steps write into what was loaded
        hook.load_state_dict(saved[2])
        for count in range(5, 10):
            train(again, optimizer, rank, count)

        assert torch.equal(flat(again), flat(model))


@ranks(2)
def test_without_the_model_nobody_listens_to_optimizers(rank: int) -> None:
    hooks = _global_optimizer_post_hooks
    before = len(hooks)
    model = paceline.replicate(model_of(), hook=local_sgd(), guard=False)
    gone = weakref.ref(model)
    assert len(hooks) == before + 1

    paceline.replica(model).set_hook(local_sgd(every=2))
    assert len(hooks) == before + 1

    del model
    gc.collect()

    assert gone() is None
    assert len(hooks) == before


@ranks(2)
def test_an_optimizer_that_steps_inside_backward_is_refused(rank: int) -> None:
    hook = local_sgd(every=2)
    model = nn.Linear(2, 2)
    hook.bind(list(model.named_parameters()), comm_over(None))
    hook.step = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step())

    with pytest.raises(RuntimeError, match="but an optimizer steps inside backward; use one or the other"):
        model(torch.ones(1, 2)).sum().backward()


def test_it_can_be_named_and_is_sure() -> None:
    assert name_of(local_sgd()) == "local_sgd(every=8, start_step=0)"
    assert name_of(local_sgd(hierarchy={8: 16, 2: 4})) == "local_sgd(start_step=0, hierarchy={2: 4, 8: 16})"
    assert name_of(local_sgd(4, dtype=HALF)) == "local_sgd(every=4, start_step=0, dtype=torch.bfloat16)"
    assert is_sure(local_sgd())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 0}, "local_sgd() needs every to be a whole number of 1 or more, got 0"),
        ({"every": 2.0}, "local_sgd() needs every to be a whole number of 1 or more, got 2.0"),
        ({"start_step": -1}, "local_sgd() needs start_step to be a whole number of 0 or more, got -1"),
        ({"hierarchy": {0: 2}}, "a hierarchy's steps to be a whole number of 1 or more, got 0"),
        ({"hierarchy": {2: 1}}, "a hierarchy's ranks to be a whole number of 2 or more, got 1"),
        ({"hierarchy": {2: 4, 3: 8}}, "both steps and ranks are multiples of those before, such as"),
        ({"hierarchy": {2: 4, 4: 4}}, "both steps and ranks are multiples of those before, such as"),
        ({"hierarchy": {2: 4}, "every": 5}, "a multiple of the hierarchy's last 2 steps, got 5"),
        ({"dtype": torch.int8}, "local_sgd() takes dtype=torch.bfloat16 or torch.float16, or None, got"),
        ({"every": 1, "dtype": torch.float16}, "local_sgd(every=1) averages gradients in every backward"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        local_sgd(**arguments)

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hierarchy": {2: 3, 4: 6}}, "4 ranks cannot be split into groups of 3"),
        ({"hierarchy": {2: 2}}, "has to say once after how many steps all 4 ranks are averaged"),
        ({"hierarchy": {2: 2, 4: 4}, "every": 8}, "has to say once after how many steps all 4 ranks"),
    ],
)
def test_a_hierarchy_that_does_not_fit_the_ranks_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        local_sgd(**arguments).bind(list(model_of().named_parameters()), World(4).comms[0])

    assert text in str(caught.value)


@ranks(1)
def test_one_rank_has_nobody_to_average_with(rank: int) -> None:
    assert dist.get_world_size() == 1
    model, alone = paceline.replicate(model_of(), hook=local_sgd(every=1)), model_of()

    for m in (model, alone):
        train(m, torch.optim.SGD(m.parameters(), lr=0.1), rank, 0)

    assert torch.equal(flat(model), flat(alone))


@ranks(2)
def test_sparse_gradients_stay_local_as_soon_as_the_others_do(rank: int) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    paceline.replicate(model, hook=local_sgd(every=100, start_step=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.tensor([rank])).sum().backward()
        rows = model[0].weight.grad.coalesce().indices().tolist()
        optimizer.step()

    assert rows == [[rank]]
