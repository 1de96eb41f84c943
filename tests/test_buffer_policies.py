"""When buffers are made equal, and which: by policies, by what changed, by a hook of the user's."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.buffer_policies import WORDS, Policies
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel

each_policy = pytest.mark.parametrize("policy", [*WORDS, 3])


class Counting(nn.Module):
    """Adds its rank and one to a buffer in each forward, and has another one that never changes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.step = rank + 1
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mask", torch.ones(256, 256).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(self.step)
        return self.layer(x)


def ones() -> torch.Tensor:
    return torch.ones(3, 4)


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(ones()).sum().backward()
        model.zero_grad()


def everyones(tensor: torch.Tensor) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, tensor.tolist())
    return rows


def outcome_of(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


class Sent(TorchDispatchMode):
    """Notes the size of every broadcast of buffers that is started inside its block.

    The order in which gradients arrive goes out by a broadcast, too; its numbers have 32 bits, and no buffer
    here is of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace == "c10d"
            and func.overloadpacket.__name__ == "broadcast_"
            and args[0][0].dtype is not torch.int32
        ):
            self.nbytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


# ---- what can be asked for --------------------------------------------------------------------------


def test_the_first_pattern_that_matches_decides() -> None:
    policies = Policies.of({"body.*.running_mean": 8, "body.*": "start", "head.mask": "never"})

    assert policies.of_buffer("body.1.running_mean") == 8
    assert policies.of_buffer("body.1.running_var") == "start"
    assert policies.of_buffer("head.mask") == "never"
    assert policies.of_buffer("Head.mask") == "after_backward"


@pytest.mark.parametrize("policy", ["sometimes", "", 0, -1, True, 1.5, ("start",)])
def test_what_is_no_policy_is_refused(policy: object) -> None:
    for given in (policy, {"seen": policy}):
        with pytest.raises(ValueError, match="is no policy for buffers; take one of after_backward, before_"):
            paceline.replicate(Counting(0), buffers=given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sean": "start"}, "the pattern 'sean' matches no buffer; there are seen, mask"),
        ({"layer.*": "start"}, "the pattern 'layer.*' matches no buffer"),
        ({"*e*": "start", "seen": 4}, "the pattern 'seen' comes too late"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(given: dict, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        paceline.replicate(Counting(0), buffers=given)

    assert text in str(caught.value)


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(TypeError, match="maps patterns of names to policies, got the pattern 3"):
        paceline.replicate(Counting(0), buffers={3: "start"})


def test_a_pattern_on_a_model_without_buffers_is_refused_but_not_a_policy_for_all() -> None:
    with pytest.raises(ValueError, match="matches no buffer; there are no buffers"):
        paceline.replicate(nn.Linear(1, 1), buffers={"x": "start"})

    paceline.replicate(nn.Linear(1, 1), buffers="start")


@pytest.mark.parametrize("broadcast", [True, False])
def test_two_ways_to_say_it_are_one_too_many(broadcast: bool) -> None:
    with pytest.raises(ValueError, match=r"give buffers \('start'\) or broadcast_buffers \(\w+\), not both"):
        paceline.replicate(Counting(0), buffers="start", broadcast_buffers=broadcast)


@ranks(2)
def test_policies_that_differ_between_the_ranks_are_refused_at_the_start(rank: int) -> None:
    policies = {"seen": "start", "mask": 2} if rank else "start"

    text = outcome_of(lambda: paceline.replicate(Counting(rank), buffers=policies))

    assert text.startswith("RanksDisagree: the ranks hold different models: the setting buffers is ")
    assert "'start' on rank 0 but {'seen': 'start', 'mask': 2} on rank 1" in text


@ranks(2)
def test_a_wrapper_that_syncs_and_one_that_does_not_are_refused_at_the_start(rank: int) -> None:
    text = outcome_of(lambda: Ours(Counting(rank), forward_sync_buffers=rank == 0))

    assert "the setting forward_sync_buffers is True on rank 0 but False on rank 1" in text


@ranks(2)
def test_a_bad_pattern_on_one_rank_is_heard_of_by_the_other(rank: int) -> None:
    patterns = {"sean" if rank else "seen": "start"}

    text = outcome_of(lambda: paceline.replicate(Counting(rank), buffers=patterns))

    assert "the pattern 'sean' matches no buffer; there are seen, mask" in text
    assert text.startswith("ValueError" if rank else "PeerFailed: rank 1 could not replicate its model")


# ---- when they are equal ----------------------------------------------------------------------------

# What `seen` is on each of two ranks: after the forward and after the backward of four steps.
EXPECTED = {
    "after_backward": ([(1, 2), (2, 3), (3, 4), (4, 5)], [(1, 1), (2, 2), (3, 3), (4, 4)]),
    "before_forward": ([(1, 2), (2, 3), (3, 4), (4, 5)], [(1, 2), (2, 3), (3, 4), (4, 5)]),
    "after_forward": ([(1, 1), (2, 2), (3, 3), (4, 4)], [(1, 1), (2, 2), (3, 3), (4, 4)]),
    3: ([(1, 2), (2, 4), (3, 6), (4, 5)], [(1, 2), (2, 4), (3, 3), (4, 5)]),
    "before_saving": ([(1, 2), (2, 4), (3, 6), (4, 8)], [(1, 2), (2, 4), (3, 6), (4, 8)]),
    "start": ([(1, 2), (2, 4), (3, 6), (4, 8)], [(1, 2), (2, 4), (3, 6), (4, 8)]),
    "never": ([(11, 22), (12, 24), (13, 26), (14, 28)], [(11, 22), (12, 24), (13, 26), (14, 28)]),
}


@each_policy
@pytest.mark.parametrize("by_pattern", [False, True])
@ranks(2)
def test_buffers_are_equal_when_their_policy_says_so(rank: int, policy: Any, by_pattern: bool) -> None:
    model = Counting(rank)
    model.seen.fill_(10 * (rank + 1))
    paceline.replicate(model, buffers={"se?n": policy, "*": "start"} if by_pattern else policy)
    if policy != "never":
        assert everyones(model.seen) == [[10], [10]]
        model.seen.zero_()  # on all ranks, so that the numbers are easy to read
    forwards, backwards = [], []

    for _ in range(4):
        loss = model(ones()).sum()
        forwards.append(tuple(int(row[0]) for row in everyones(model.seen)))
        loss.backward()
        backwards.append(tuple(int(row[0]) for row in everyones(model.seen)))

    assert (forwards, backwards) == EXPECTED[policy]


@each_policy
@ranks(2)
def test_sync_buffers_makes_all_of_them_equal_but_those_that_never_are(rank: int, policy: Any) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    model.seen.fill_(rank + 5)

    paceline.replica(model).sync_buffers()

    assert everyones(model.seen) == ([[5], [6]] if policy == "never" else [[5], [5]])


@ranks(2)
def test_each_buffer_has_its_own_policy(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    policies = {"*.running_mean": "start", "*.running_var": "before_saving"}
    paceline.replicate(model, buffers=policies)

    model(torch.randn(8, 4) * (rank + 1) + rank).sum().backward()
    model[1].num_batches_tracked.add_(rank)
    train(model)

    assert everyones(model[1].num_batches_tracked) == [2, 2]
    mean, var = everyones(model[1].running_mean), everyones(model[1].running_var)
    assert mean[0] != mean[1]
    assert var[0] != var[1]
    paceline.replica(model).sync_buffers()
    assert everyones(model[1].running_var) == [var[0], var[0]]


@ranks(2)
def test_never_leaves_buffers_of_different_shapes_to_each_rank(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mine", torch.full((rank + 1,), float(rank)))

    paceline.replicate(model, buffers={"mine": "never"})
    train(model, 2)
    paceline.replica(model).sync_buffers()

    assert everyones(model.mine) == [[0.0], [1.0, 1.0]]


@ranks(2)
def test_a_model_without_parameters_has_buffers_too(rank: int) -> None:
    model = nn.Module()
    model.register_buffer("seen", torch.full((1,), float(rank + 3)))
    paceline.replicate(model)
    assert everyones(model.seen) == [[3], [3]]
    model.seen.add_(rank)

    paceline.replica(model).sync_buffers()

    assert everyones(model.seen) == [[3], [3]]


def test_one_process_alone_keeps_its_buffers() -> None:
    for policy in (*WORDS, 3):
        model = paceline.replicate(Counting(0), buffers=policy)
        train(model, 3)
        paceline.replica(model).sync_buffers()

        assert model.seen.item() == 3


# ---- policies around forward ------------------------------------------------------------------------


around_forward = pytest.mark.parametrize("policy", ["before_forward", "after_forward"])


@around_forward
@ranks(2)
def test_one_rank_may_evaluate_alone(rank: int, policy: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    train(model)

    if rank == 1:
        model.eval()
        model(ones())
        model.train()
    train(model, 2)
    paceline.replica(model).sync_buffers()

    assert everyones(model.seen) == [[3], [3]]


@around_forward
@ranks(2)
def test_ranks_may_run_different_numbers_of_forwards_inside_no_sync(rank: int, policy: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    with paceline.no_sync(model):
        for _ in range(rank + 1):
            model(ones()).sum().backward()

    model(ones()).sum().backward()
    paceline.replica(model).sync_buffers()

    assert everyones(model.seen) == [[2], [2]]


@around_forward
@ranks(2)
def test_ranks_that_run_out_of_batches_take_part_at_the_end_of_backward(rank: int, policy: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)

    with paceline.join(model):
        train(model, 2 + 2 * rank)

    # Two steps in common end at rank 0's 2, then rank 1 alone adds 2 twice.
    assert everyones(model.seen) == [[6], [6]]


@ranks(2)
def test_after_join_only_what_is_kept_equal_in_training_is_that_of_the_last_rank(rank: int) -> None:
    model = paceline.replicate(Counting(rank), buffers={"seen": "start"})

    with paceline.join(model):
        train(model, 2 + rank)

    assert everyones(model.seen) == [[2], [6]]
    assert torch.equal(model.mask, torch.ones(256, 256).tril())


@around_forward
@ranks(2)
def test_what_a_backward_computes_again_is_no_forward(rank: int, policy: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)

    with Sent() as sent:
        for _ in range(2):
            checkpoint(model, ones(), use_reentrant=False).sum().backward()

    assert len(sent.nbytes) == (1 if policy == "before_forward" else 2)


@around_forward
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
@ranks(2)
def test_copies_are_plain(rank: int, policy: str, how: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    copies = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
    twin = copies[how](model)

    if rank == 1:
        twin(ones())  # would wait for ever
    train(model)


@around_forward
@ranks(2)
def test_detach_takes_the_hooks_off(rank: int, policy: str) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    plain = paceline.replica(model).detach()

    assert plain is model
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    if rank == 1:
        model(ones())


# ---- only what changed is sent ----------------------------------------------------------------------


SEEN, MASK = 4, 256 * 256 * 4


@pytest.mark.parametrize("policy", ["after_backward", "before_forward", "after_forward", 1])
@ranks(2)
def test_what_did_not_change_is_not_sent(rank: int, policy: Any) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    train(model)

    with Sent() as sent:
        train(model, 3)
    model.step = 0
    model.forward = model.layer.forward  # from here on nothing changes
    train(model, 2)
    with Sent() as nothing:
        train(model, 3)

    assert sent.nbytes == [SEEN] * 3
    assert nothing.nbytes == []


@ranks(2)
def test_the_wrapper_does_not_send_what_did_not_change(rank: int) -> None:
    model = Ours(Counting(rank))

    with Sent() as sent:
        train(model, 3)

    assert sent.nbytes == [SEEN] * 2


@pytest.mark.parametrize("changed_on", [0, 1])
@ranks(2)
def test_a_change_on_any_one_rank_is_sent(rank: int, changed_on: int) -> None:
    model = paceline.replicate(Counting(rank))
    train(model)

    if rank == changed_on:
        model.mask.zero_()
    with Sent() as sent:
        train(model, 2)

    assert sent.nbytes == [SEEN + MASK, SEEN]
    assert model.mask.any() == (changed_on == 1)


def write(model: Counting) -> None:
    model.mask.mul_(2)


def replace(model: Counting) -> None:
    model.mask = model.mask * 2


def assign_data(model: Counting) -> None:
    model.mask.data = model.mask * 2


def load(model: Counting) -> None:
    model.load_state_dict({**model.state_dict(), "mask": model.mask * 2})


def write_a_part(model: Counting) -> None:
    model.mask[0] *= 2


def write_through_data(model: Counting) -> None:
    model.mask.data.mul_(2)


def write_through_numpy(model: Counting) -> None:
    model.mask.numpy()[:] *= 2


def write_unseen_and_count_it(model: Counting) -> None:
    model.mask.data.mul_(2)
    torch.autograd.graph.increment_version(model.mask)


def write_in_inference_mode(model: Counting) -> None:
    with torch.inference_mode():
        model.mask.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        write,
        replace,
        assign_data,
        load,
        write_a_part,
        write_through_data,
        write_through_numpy,
        write_unseen_and_count_it,
        write_in_inference_mode,
    ],
    ids=lambda f: f.__name__,
)
@ranks(2)
def test_a_change_is_seen_in_whatever_way_it_is_made(rank: int, change: Any) -> None:
    model = paceline.replicate(Counting(rank))
    train(model)
    if rank == 0:
        change(model)
    expected = model.mask.clone()

    train(model)

    dist.broadcast(expected, 0)
    assert torch.equal(model.mask, expected)


@ranks(2)
def test_what_kernels_write_without_a_trace_is_sent_before_the_wrappers_next_forward(rank: int) -> None:
    observer = FusedMovingAvgObsFakeQuantize(
        observer=MovingAverageMinMaxObserver
    )  # of quantization-aware training
    model = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), observer))

    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    versions = [b._version for b in model.buffers()]
    model(torch.zeros(2, 4))

    lowest, highest = observer.activation_post_process.min_val, observer.activation_post_process.max_val
    assert versions == [0] * len(versions), "this kernel counts its changes now; find another one"
    assert everyones(lowest)[0] == everyones(lowest)[1]
    assert everyones(highest)[0] == everyones(highest)[1]


@ranks(2)
def test_a_buffer_without_a_version_is_always_sent(rank: int) -> None:
    with torch.inference_mode():
        frozen = torch.full((2,), float(rank))
    model = nn.Linear(4, 2)
    model.register_buffer("frozen", frozen)
    paceline.replicate(model)

    with Sent() as sent:
        train(model, 2)

    assert sent.nbytes == [8, 8]
    assert everyones(model.frozen) == [[0, 0], [0, 0]]


@ranks(2)
def test_what_batch_norm_writes_without_a_trace_is_sent_in_training_mode(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    paceline.replicate(model)

    with Sent() as sent:
        for _ in range(2):
            model(torch.randn(8, 4) + rank).sum().backward()
    model.eval()
    with Sent() as frozen:
        model(torch.randn(8, 4)).sum().backward()

    assert sent.nbytes == [4 * 4 + 4 * 4 + 8] * 2
    assert frozen.nbytes == []


@ranks(2)
def test_running_figures_of_a_module_of_the_users_own_are_sent(rank: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("my_mean", torch.zeros(4))
            self.register_buffer("my_var", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, self.my_mean, self.my_var, training=self.training)

    model = nn.Sequential(nn.Linear(4, 4), Normed())
    paceline.replicate(model)

    model(torch.randn(8, 4) + rank).sum().backward()

    assert model[1].my_mean.any()
    assert everyones(model[1].my_mean)[0] == everyones(model[1].my_mean)[1]


@ranks(2)
def test_what_was_written_in_training_is_sent_although_the_model_evaluates_by_now(rank: int) -> None:
    model = Ours(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4) + rank).sum().backward()

    model.eval()
    model(torch.randn(8, 4))

    assert len({str(row) for row in everyones(model.module[1].running_mean)}) == 1


@ranks(2)
def test_a_tensor_under_two_names_is_sent_once(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Identity(), nn.Identity())
    shared = torch.zeros(2)
    model[1].register_buffer("one", shared)
    model[2].register_buffer("two", shared)
    paceline.replicate(model)
    shared.add_(rank + 1)

    with Sent() as sent:
        train(model)

    assert sent.nbytes == [8]
    assert everyones(shared) == [[1, 1], [1, 1]]


@ranks(2)
def test_what_ranks_did_not_start_with_in_common_is_sent_the_first_time(rank: int) -> None:
    model = Counting(rank)
    model.mask.fill_(rank)
    wrapped = Ours(model, init_sync=False)

    with Sent() as sent:
        train(wrapped, 2)

    assert sent.nbytes == [SEEN + MASK, SEEN]
    assert not model.mask.any()


# ---- buffers that differ in shape or dtype ----------------------------------------------------------


def reshape(model: Counting) -> None:
    model.seen = torch.zeros(2)


def cast(model: Counting) -> None:
    model.seen = model.seen.double()


def take_away(model: Counting) -> None:
    model.seen = None


DIFFERENCES = {
    reshape: "seen is (1,) float32 on ranks 0, 2 but (2,) float32 on rank 1",
    cast: "seen is (1,) float32 on ranks 0, 2 but (1,) float64 on rank 1",
    take_away: "seen is (1,) float32 on ranks 0, 2 but missing on rank 1",
}


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", ["after_backward", "before_forward", 1])
@ranks(3)
def test_a_buffer_that_differs_on_one_rank_is_named_on_all(rank: int, policy: Any, change: Any) -> None:
    model = paceline.replicate(Counting(rank), buffers=policy)
    train(model)
    before = model.seen
    if rank == 1:
        change(model)
        model.forward = model.layer.forward

    text = outcome_of(lambda: train(model))

    where = "step 1: " if policy != "before_forward" else ""
    assert text.startswith(f"RanksDisagree: {where}the ranks hold different buffers: {DIFFERENCES[change]}. ")
    assert model.layer.weight.grad is None
    model.seen = before
    model.forward = model.layer.forward
    train(model, 2)
    paceline.replica(model).sync_buffers()
    assert len({str(row) for row in everyones(model.seen)}) == 1


@ranks(2)
def test_sync_buffers_names_what_differs(rank: int) -> None:
    model = paceline.replicate(Counting(rank), buffers="start")
    if rank == 1:
        reshape(model)

    text = outcome_of(paceline.replica(model).sync_buffers)

    assert text.startswith(
        "RanksDisagree: the ranks hold different buffers: seen is (1,) float32 on rank 0 but"
    )


@ranks(2)
def test_the_wrapper_names_what_differs(rank: int) -> None:
    model = Ours(Counting(rank))
    train(model)
    if rank == 0:
        cast(model.module)

    text = outcome_of(lambda: train(model))

    assert "seen is (1,) float64 on rank 0 but (1,) float32 on rank 1" in text


@ranks(2)
def test_a_buffer_that_changes_its_shape_on_all_ranks_is_kept_equal(rank: int) -> None:
    model = paceline.replicate(Counting(rank))
    train(model)

    model.seen = torch.full((3,), float(rank))
    train(model, 2)

    assert everyones(model.seen) == [[2, 2, 2], [2, 2, 2]]


@ranks(2)
def test_an_optimizer_inside_backward_has_stepped_alike_when_buffers_differ(rank: int) -> None:
    model = paceline.replicate(Counting(rank))
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 1:
        reshape(model)

    text = outcome_of(lambda: train(model))

    assert "the ranks hold different buffers" in text
    assert everyones(model.layer.weight)[0] == everyones(model.layer.weight)[1]


# ---- two networks, two forwards ---------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def train_gan(wrap: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Train two networks against each other; the critic runs two forwards before its backward."""
    torch.manual_seed(0)
    maker, judge = wrap(generator()), wrap(critic())
    first = torch.optim.SGD(maker.parameters(), lr=0.1)
    second = torch.optim.SGD(judge.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        real, noise = torch.randn(2, 8, 4, generator=source)
        fake = maker(noise)
        second.zero_grad()
        (judge(fake.detach()).mean() - judge(real).mean()).backward()
        second.step()
        first.zero_grad()
        judge(fake).mean().neg().backward()
        first.step()
    return [t.detach().clone() for model in (maker, judge) for t in (*model.parameters(), *model.buffers())]


@ranks(2)
def test_a_gan_trains_as_with_torchs_class(rank: int) -> None:
    ours, theirs = train_gan(Ours, rank), train_gan(Theirs, rank)

    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("policy", ["after_backward", "before_forward", "after_forward", 2])
@ranks(2)
def test_a_gan_trains_with_every_policy(rank: int, policy: Any) -> None:
    # Without a difference in buffers, running figures have no say in training: the weights are the same.
    expected = train_gan(Theirs, rank)

    got = train_gan(lambda model: paceline.replicate(model, buffers=policy), rank)

    for mine, other in zip(got[:6], expected[:6], strict=True):
        torch.testing.assert_close(mine, other)


# ---- the wrapper's hook -----------------------------------------------------------------------------


def total_now(group: Any, named: dict[str, torch.Tensor]) -> None:
    for buffer in named.values():
        dist.all_reduce(buffer, group=group)


def total_later(group: Any, named: dict[str, torch.Tensor]) -> list[Any]:
    works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in named.values()]
    return [work.get_future() for work in works]


def total_at_some_time(group: Any, named: dict[str, torch.Tensor]) -> Any:
    return torch.futures.collect_all(total_later(group, named))


@pytest.mark.parametrize("hook", [total_now, total_later, total_at_some_time], ids=lambda f: f.__name__)
@pytest.mark.parametrize("location", list(Location), ids=lambda place: place.name)
@ranks(2)
def test_a_buffer_hook_does_what_it_does_with_torchs_class(rank: int, hook: Any, location: Any) -> None:
    seen: dict[type, list[float]] = {Ours: [], Theirs: []}
    for kind in (Ours, Theirs):
        model = kind(Counting(rank))
        # torch's takes lists of futures only.
        theirs = total_later if hook is total_at_some_time else hook
        model._register_buffer_comm_hook(None, hook if kind is Ours else theirs, location)
        for step in range(3):
            loss = model(ones()).sum()
            if hook is total_now:
                seen[kind].append(model.module.seen.item())
            loss.backward()
            if hook is total_now or location is Location.POST_FORWARD:
                seen[kind].append(model.module.seen.item())
            model.module.seen.fill_(step)

    assert seen[Ours] == seen[Theirs]
    assert seen[Ours] or (hook is not total_now and location is Location.PRE_FORWARD)


@ranks(2)
def test_a_buffer_hook_may_use_torchs_names(rank: int) -> None:
    def take_from_last(model: Ours, named: dict[str, torch.Tensor]) -> None:
        assert list(named) == ["seen", "mask"]
        assert all(named[name] is buffer for name, buffer in model.module.named_buffers())
        model._default_broadcast_coalesced(list(named.values()), authoritative_rank=1)

    model = Ours(Counting(rank))
    model._register_buffer_comm_hook(model, take_from_last)

    train(model)

    assert everyones(model.module.seen) == [[2], [2]]
    assert list(model.named_module_buffers) == ["seen", "mask"]
    assert model.modules_buffers[0] is model.module.seen
    model.module.seen.fill_(rank)
    model._default_broadcast_coalesced()
    assert everyones(model.module.seen) == [[0], [0]]


@ranks(2)
def test_what_a_buffer_hook_writes_does_not_disturb_a_backward_to_come(rank: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("scale", torch.full((2,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * self.scale * x  # autograd keeps the buffer

    def double(_: Any, named: dict[str, torch.Tensor]) -> None:
        named["scale"].mul_(2)

    model = Ours(Scaled())
    model._register_buffer_comm_hook(None, double, Location.PRE_FORWARD)

    first, second = model(torch.ones(2)), model(torch.ones(2))
    (first + second).sum().backward()

    assert model.module.weight.grad is not None
    assert model.module.scale.tolist() == [8, 8]


@ranks(2)
def test_after_a_buffer_hook_everything_counts_as_changed(rank: int) -> None:
    def spoil(_: Any, named: dict[str, torch.Tensor]) -> None:
        named["mask"].fill_(rank)

    model = Ours(Counting(rank))
    model._register_buffer_comm_hook(None, spoil)
    train(model)

    paceline.replica(model).sync_buffers()

    assert not model.module.mask.any()


@pytest.mark.parametrize("hook", [total_now, total_later], ids=lambda f: f.__name__)
@pytest.mark.parametrize("location", list(Location), ids=lambda place: place.name)
@ranks(2)
def test_ranks_without_batches_take_part_in_a_buffer_hook(rank: int, location: Any, hook: Any) -> None:
    model = Ours(Counting(rank))
    model._register_buffer_comm_hook(None, hook, location)

    with model.join():
        train(model, 1 + 2 * rank)

    assert everyones(model.module.seen)[0] == everyones(model.module.seen)[1]


class Noted:
    """A future that notes whether somebody has waited for it."""

    is_over = False

    def wait(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("location", list(Location), ids=lambda place: place.name)
@ranks(2)
def test_futures_of_a_buffer_hook_are_waited_for_whoever_has_batches(rank: int, location: Any) -> None:
    futures: list[Noted] = []

    def hook(_: Any, named: dict[str, torch.Tensor]) -> list[Noted]:
        assert all(future.is_over for future in futures)
        futures.append(Noted())
        return futures[-1:]

    model = Ours(Counting(rank))
    model._register_buffer_comm_hook(None, hook, location)
    loss = model(ones()).sum()
    assert not futures[0].is_over
    loss.backward()
    assert futures[0].is_over
    with torch.no_grad():
        model(ones())
    assert futures[1].is_over
    train(model)

    with model.join():
        train(model, 1 + 2 * rank)

    assert len(futures) == 5
    assert all(future.is_over for future in futures)


def test_bad_buffer_hooks_are_refused_when_registered() -> None:
    model = Ours(Counting(0))
    with pytest.raises(TypeError, match=r"has to be a function of \(state, buffers\), got int"):
        model._register_buffer_comm_hook(None, 3)
    with pytest.raises(
        TypeError, match=r"has to be a function of \(state, buffers\), but it is .*lambda.*\(x\)"
    ):
        model._register_buffer_comm_hook(None, lambda x: None)
    with pytest.raises(ValueError, match="runs at PRE_FORWARD or POST_FORWARD, got 'SIDEWAYS'"):
        model._register_buffer_comm_hook(None, total_now, "SIDEWAYS")


@ranks(2)
def test_a_buffer_hook_that_returns_something_else_is_named(rank: int) -> None:
    model = Ours(Counting(rank))
    model._register_buffer_comm_hook(None, lambda state, named: [torch.zeros(1)], Location.PRE_FORWARD)

    with pytest.raises(TypeError, match="has to return nothing, a future or a list of futures, got Tensor"):
        model(ones())
