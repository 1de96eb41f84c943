"""The audit: ranks that do not hold the same bits find out, name the odd one, and heal if told to."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.auditing import Difference, Schedule, differences, disagreement, held_by, read_schedule
from paceline.fingerprint import Prints, fingerprint, fingerprint_all, read_each
from paceline.hooks import local_sgd, noop
from paceline.testing import ranks
from tests.promises.libraries import Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model


class Lines(logging.Handler):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("paceline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def flip(tensor: torch.Tensor, bit: int = 22, place: int = 0) -> None:
    """Flip one bit of one number, as a fault of the memory does; a low one may be rounded away again."""
    with torch.no_grad():
        words = tensor.data.reshape(1) if tensor.dim() == 0 else tensor.data
        words.view(torch.uint8).view(-1)[place * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, share(batch())).backward()
        optimizer.step()


def told_within(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[int, paceline.RanksDisagree]:
    """Train until the audit raises; return after how many steps, and what, which is the same everywhere."""
    done = 0
    with pytest.raises(paceline.RanksDisagree) as caught:
        for _ in range(steps):
            train(model, optimizer)
            done += 1
    assert len(set(gather((done, str(caught.value))))) == 1
    return done, caught.value


def assert_equal_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = held_by(model.named_parameters(), [optimizer])
    mine = read_each([value for value in held.values() if isinstance(value, torch.Tensor)])
    assert gather(mine) == [mine] * dist.get_world_size()


# ---- fingerprints ---------------------------------------------------------------------------------------

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
)


@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]),
    numel=st.integers(1, 40),
    data=st.data(),
)
def test_any_flipped_bit_is_found(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    tensor = torch.arange(numel).to(dtype)
    before = int(fingerprint(tensor))

    flip(tensor, data.draw(st.integers(0, 8 * dtype.itemsize - 1)), data.draw(st.integers(0, numel - 1)))

    assert int(fingerprint(tensor)) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_strides_nor_the_place_in_memory_matter(dtype: torch.dtype) -> None:
    tensor = (torch.arange(105) % 2 if dtype is torch.bool else torch.arange(105)).to(dtype).view(3, 5, 7)
    turned = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    moved = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:].view(3, 5, 7)
    assert not turned.is_contiguous()
    assert moved.data_ptr() % 8 or dtype.itemsize >= 8

    assert int(fingerprint(turned)) == int(fingerprint(moved)) == int(fingerprint(tensor))


def test_the_sign_of_zero_counts() -> None:
    assert int(fingerprint(torch.tensor(0.0))) != int(fingerprint(torch.tensor(-0.0)))


def test_views_that_only_promise_to_conjugate_or_negate_are_read_as_what_they_stand_for() -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])

    assert int(fingerprint(number.conj())) == int(fingerprint(number.conj().resolve_conj()))
    assert int(fingerprint(number.conj().imag)) == int(fingerprint(number.conj().imag.clone()))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)], ids=str)
def test_tensors_of_any_shape_have_one(shape: tuple[int, ...]) -> None:
    assert isinstance(int(fingerprint(torch.ones(shape))), int)
    assert read_each([torch.ones(shape), torch.zeros(3)])[1] == 0


def test_small_tensors_share_an_operator_and_large_ones_are_not_copied() -> None:
    small, large = [torch.ones(3) for _ in range(50)], torch.ones(100_000)

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        prints = fingerprint_all([*small, large])

    sums = sum(event.count for event in seen.key_averages() if event.key == "aten::sum")
    assert len(prints) == 2
    assert sums <= 3
    assert max(event.self_cpu_memory_usage for event in seen.events()) < large.nbytes


@pytest.mark.parametrize("place", [0, 7, 20])
def test_a_bit_in_one_of_many_tensors_changes_what_stands_for_all(place: int) -> None:
    tensors = [torch.ones(n + 1) for n in range(20)] + [torch.ones(100_001)]
    before = Prints(tensors).read()

    flip(tensors[place], bit=22)

    assert Prints(tensors).read() != before


# ---- what is compared -----------------------------------------------------------------------------------


def test_parameters_come_first_and_then_their_state_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    held = held_by(model.named_parameters(), [optimizer])

    assert list(held) == ["weight", "bias"] + [
        f"{key} of {name} (Adam)" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq", "step")
    ]


def test_state_in_lists_and_plain_numbers_are_held_too() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.tensor([[1.0, 2.0], [3.0, -1.0]])) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    held = held_by(model.named_parameters(), [optimizer])

    assert isinstance(held["n_iter of weight (LBFGS)"], int)
    assert isinstance(held["old_dirs[0] of weight (LBFGS)"], torch.Tensor)


# ---- words ----------------------------------------------------------------------------------------------


def seen(*values: str | None) -> dict[int, tuple[str, str] | None]:
    return {rank: None if value is None else ("float32 (2,)", value) for rank, value in enumerate(values)}


def test_the_odd_ranks_are_those_that_the_majority_does_not_agree_with() -> None:
    one = Difference("w", seen("1", "2", "1"))

    assert (one.majority, one.odd, one.is_curable) == ([0, 2], [1], True)
    assert str(one) == "w on rank 1 is not what ranks 0, 2 hold"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            ("1", "2"),
            "w is not the same on ranks 0, 1 (two ranks have no majority, so none is sure to be right)",
        ),
        (
            ("1", "1", "2", "2"),
            "w is not the same on ranks 0, 1, 2, 3 (no majority of them agrees, so none is sure to be right)",
        ),
        (("1", None, "1"), "w is there on ranks 0, 2 only"),
    ],
)
def test_what_cannot_be_healed_says_why(values: tuple[str | None, ...], words: str) -> None:
    one = Difference("w", seen(*values))

    assert str(one) == words
    assert not one.is_curable


def test_other_shapes_and_plain_numbers_cannot_be_healed() -> None:
    shapes = {0: ("float32 (2,)", "1"), 1: ("float32 (2,)", "1"), 2: ("float32 (3,)", "1")}
    numbers = {0: ("a number", "1"), 1: ("a number", "1"), 2: ("a number", "2")}

    assert not Difference("w", shapes).is_curable
    assert not Difference("w", numbers).is_curable


def test_differences_come_in_the_order_of_the_list() -> None:
    found = differences(
        {r: {n: ("x", str(r * n.startswith("b"))) for n in ("b2", "a", "b1")} for r in (0, 1)}
    )

    assert [each.name for each in found] == ["b2", "b1"]


def test_the_advice_fits_what_was_asked_for() -> None:
    curable, not_curable = Difference("w", seen("1", "2", "1")), Difference("w", seen("1", None, "1"))

    assert "or let audit(heal=True)" in str(disagreement(4, [curable], Schedule()))
    assert "heal" not in str(disagreement(4, [not_curable], Schedule()))
    assert "heal=True cannot mend this" in str(disagreement(4, [curable, not_curable], Schedule(heal=True)))
    assert "and 1 more differ" in str(disagreement(4, [curable, not_curable], Schedule()))


# ---- ranks ----------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize(
    "what", ["0.weight", "2.bias", "exp_avg_sq of 2.weight (Adam)", "step of 0.bias (Adam)"]
)
@ranks(3)
def test_one_flipped_bit_is_found_within_k_steps_and_the_rank_named(
    rank: int, library: Library, what: str
) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    paceline.audit(wrapped, every=4)
    train(wrapped, optimizer, 5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rank == 1:
        flip(held_by(model.named_parameters(), [optimizer])[what])

    steps, error = told_within(wrapped, optimizer, 4)

    assert steps == 3
    assert what in error.tensors
    assert error.ranks == (1,)
    assert error.tensors[0] in str(error)
    assert "on rank 1 is not what ranks 0, 2 hold" in str(error)
    assert "step 8:" in str(error)
    assert all(p.grad is None for p in model.parameters())
    if rank != 1 and what in before:
        assert not torch.equal(
            before[what], dict(model.named_parameters())[what]
        )  # it has trained until then


@ranks(2)
def test_two_ranks_have_no_majority_whether_they_are_to_heal_or_not(rank: int) -> None:
    for heal in (False, True):
        model = paceline.replicate(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.audit(model, every=1, heal=heal)
        train(model, optimizer)
        if rank:
            flip(model[0].weight)

        _, error = told_within(model, optimizer, 1)

        assert "0.weight is not the same on ranks 0, 1 (two ranks have no majority" in str(error)
        assert error.ranks == (0, 1)


@ranks(2)
def test_a_mended_model_trains_on_and_one_that_is_not_raises_again(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=10)
    train(model, optimizer)
    if rank:
        flip(model[0].weight)
    told_within(model, optimizer, 10)

    steps, _ = told_within(model, optimizer, 10)
    paceline.replica(model).take_parameters(0)

    assert steps == 0
    train(model, optimizer, 12)
    assert_equal_everywhere(model, optimizer)


@on_both
@ranks(4)
def test_heal_drops_the_step_and_sends_the_majority_s_numbers(rank: int, library: Library) -> None:
    log = Lines()
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    paceline.audit(wrapped, every=1, heal=True)
    train(wrapped, optimizer, 2)
    right = [p.detach().clone() for p in model.parameters()]
    if rank == 2:
        flip(model[0].weight, bit=30, place=5)
        flip(optimizer.state[model[2].bias]["exp_avg"])
    if rank == 0:
        flip(model[2].weight)  # another rank's fault, in another tensor

    train(wrapped, optimizer)

    assert all(torch.equal(p, r) for p, r in zip(model.parameters(), right, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert paceline.replica(wrapped).stats().skipped_steps == 1
    assert log.lines == [
        "WARNING paceline: step 2 was dropped on every rank, and the majority's numbers were sent again: "
        "0.weight on rank 2, 2.weight on rank 0, exp_avg of 2.bias (AdamW) on rank 2"
    ]
    train(wrapped, optimizer, 2)
    assert_equal_everywhere(model, optimizer)
    assert len(log.lines) == 1


@ranks(3)
def test_a_healed_run_is_the_run_without_the_fault(rank: int) -> None:
    models = []
    for faulty in (True, False):
        model = paceline.replicate(small_model())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        paceline.audit(model, every=2, heal=True)
        train(model, optimizer, 2)
        if faulty and rank == 0:
            flip(model[0].bias, bit=29)
        train(model, optimizer, 3 + faulty)
        models.append(model)

    ours, theirs = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@ranks(3)
def test_state_that_only_some_ranks_have_is_named_and_not_healed(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.audit(model, every=1, heal=True)
    train(model, optimizer)
    if rank == 2:
        del optimizer.state[model[2].weight]["momentum_buffer"]

    _, error = told_within(model, optimizer, 1)

    assert "momentum_buffer of 2.weight (SGD) is there on ranks 0, 1 only" in str(error)
    assert "heal=True cannot mend this" in str(error)


@ranks(2)
def test_frozen_parameters_are_compared_and_left_out_ones_are_not(rank: int) -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    paceline.replicate(model, left_out=["2.bias"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=1)
    with torch.no_grad():
        model[2].bias.fill_(rank)
    train(model, optimizer, 2)
    if rank:
        flip(model[0].weight)

    _, error = told_within(model, optimizer, 1)

    assert error.tensors == ("0.weight",)


@ranks(2, warnings="default")  # importing torch's optimizer warns
def test_state_that_lies_in_shards_is_left_out(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = paceline.replicate(small_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    paceline.audit(model, every=1)

    train(model, optimizer, 3)

    if rank:
        flip(model[2].bias)
    _, error = told_within(model, optimizer, 1)
    assert error.tensors == ("2.bias",)


@ranks(2)
def test_two_optimizers_whose_first_steps_came_in_different_orders_are_the_same(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizers = [torch.optim.Adam(model[place].parameters(), lr=0.01) for place in (0, 2)]
    paceline.audit(model, every=1)

    for _ in range(3):
        loss_of(model, share(batch())).backward()
        for optimizer in optimizers if rank else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_skipped_batches_and_failed_steps_disturb_nothing(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paceline.audit(model, every=2)
    for step in range(12):
        optimizer.zero_grad()
        if step in (1, 2, 7, 8) and rank:
            paceline.skip(model)
        elif step in (4, 6, 9):
            with pytest.raises((ZeroDivisionError, paceline.PeerFailed)):
                loss = loss_of(model, share(batch()))
                if rank == 0:
                    loss.register_hook(lambda g: 1 / 0)
                loss.backward()
            continue
        else:
            loss_of(model, share(batch())).backward()
        optimizer.step()
    if rank:
        flip(model[0].weight)

    told_within(model, optimizer, 3)


@ranks(3)
def test_it_heals_as_soon_as_all_ranks_have_a_batch(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=50, heal=True)
    if rank == 1:
        flip(model[0].weight)

    for step in range(3):
        optimizer.zero_grad()
        if step < 2 and rank == 0:
            paceline.skip(model)
        else:
            loss_of(model, share(batch())).backward()
        optimizer.step()

    assert paceline.replica(model).stats().skipped_steps == 1
    assert_equal_everywhere(model, optimizer)


@ranks(2)
def test_ranks_that_have_run_out_of_batches_may_differ_until_they_join(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=1)

    with paceline.join(model):
        train(model, optimizer, 2 + 2 * rank)

    train(model, optimizer, 2)


@ranks(2)
def test_a_layer_that_was_added_since_is_compared(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=1)
    train(model, optimizer, 2)
    torch.manual_seed(rank)
    model.append(nn.Linear(3, 2))
    optimizer.add_param_group({"params": model[3].parameters()})

    train(model, optimizer, 3)
    if rank:
        flip(model[3].weight)

    _, error = told_within(model, optimizer, 1)
    assert error.tensors == ("3.weight",)


@ranks(2)
def test_it_goes_along_with_the_optimizer_inside_backward(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paceline.replica(model).step_in_backward(optimizer)
    paceline.audit(model, every=1)
    train(model, optimizer, 3)
    if rank:
        flip(optimizer.state[model[0].weight]["exp_avg"])

    _, error = told_within(model, optimizer, 1)

    assert error.tensors == ("exp_avg of 0.weight (Adam)",)


@ranks(2)
def test_it_changes_no_gradient_and_can_be_switched_off(rank: int) -> None:
    model = paceline.replicate(small_model())
    paceline.audit(model, every=1)
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    loss_of(model, share(batch())).backward()
    assert verdict(model, expected) == EQUAL

    for off in (0, None):
        paceline.audit(model, every=off)
        if rank:
            flip(model[0].weight)
        model.zero_grad()
        loss_of(model, share(batch())).backward()


@ranks(2)
def test_ranks_that_ask_for_different_audits_are_told(rank: int) -> None:
    model = paceline.replicate(small_model())
    paceline.audit(model, every=2 + rank)

    with pytest.raises(paceline.RanksDisagree, match="audit\\(every=2, heal=False\\) \\(rank 0\\)"):
        loss_of(model, share(batch())).backward()


# ---- a device: the fingerprints come later --------------------------------------------------------------


@contextlib.contextmanager
def fingerprints_that_take(questions: int) -> Iterator[None]:
    """Let fingerprints be on their way for a while: on a device the host does not wait for them."""

    def is_here(prints: Prints) -> bool:
        asked = prints.__dict__.setdefault("asked", 0)
        prints.__dict__["asked"] = asked + 1
        return asked >= questions

    with mock.patch.object(Prints, "is_here", property(is_here)):
        yield


@pytest.mark.parametrize("late", [0, 1])
@ranks(3)
def test_what_is_seen_later_is_compared_later(rank: int, late: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paceline.audit(model, every=4)
    with fingerprints_that_take(1 + late * rank):  # not the same on every rank
        train(model, optimizer, 3)
        if rank == 1:
            flip(model[0].weight)

        steps, error = told_within(model, optimizer, 6)

    assert steps == (2 if not late else 4)
    assert "0.weight on rank 1 is not what ranks 0, 2 hold" in str(error)


@ranks(3)
def test_what_is_seen_later_is_healed_later(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paceline.audit(model, every=1, heal=True)
    with fingerprints_that_take(1):
        train(model, optimizer, 3)
        if rank == 1:
            flip(model[0].weight)
        train(model, optimizer, 3)

    assert_equal_everywhere(model, optimizer)
    assert paceline.replica(model).stats().skipped_steps == 1


@ranks(2)
def test_what_differed_and_does_so_no_more_is_only_logged(rank: int) -> None:
    log = Lines()
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=50)
    with fingerprints_that_take(1):
        if rank:
            flip(model[0].weight)
        loss_of(model, share(batch())).backward()
        paceline.replica(model).take_parameters(0)
        train(model, optimizer, 2)

    assert log.lines == [
        "WARNING paceline: step 1: the ranks did not hold the same weights and optimizer state at step 0, "
        "and do so again"
    ]


@ranks(2)
def test_a_step_that_fails_while_they_are_on_their_way_is_made_up_for(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.audit(model, every=50)
    with fingerprints_that_take(1):
        train(model, optimizer)
        if rank:
            flip(model[0].weight)
        with pytest.raises((ZeroDivisionError, paceline.PeerFailed)):
            loss = loss_of(model, share(batch()))
            if rank == 0:
                loss.register_hook(lambda g: 1 / 0)
            loss.backward()

        steps, _ = told_within(model, optimizer, 3)

    assert steps == 1


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "heal", "kind", "text"),
    [
        (-1, False, ValueError, "for n of 1 or more \\(0 is off\\), got -1"),
        (2.5, False, TypeError, "for a whole number n, got float"),
        ("50", False, TypeError, "for a whole number n, got str"),
        (True, False, TypeError, "for a whole number n, got bool"),
        (50, "yes", TypeError, "heal has to be True or False, got str"),
    ],
)
def test_bad_arguments_are_refused(every: Any, heal: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        read_schedule(every, heal)


def test_off_is_off() -> None:
    assert read_schedule(0, False) is None
    assert read_schedule(None, True) is None


@pytest.mark.parametrize("hook", [local_sgd(every=2), noop], ids=["local_sgd", "noop"])
def test_a_hook_that_lets_weights_differ_is_refused_in_either_order(hook: Any) -> None:
    with_hook = paceline.replicate(nn.Linear(2, 2), hook=hook)
    audited = paceline.replicate(nn.Linear(2, 2))
    paceline.audit(audited)

    with pytest.raises(ValueError, match="lets them differ by design"):
        paceline.audit(with_hook)
    with pytest.raises(ValueError, match="lets them differ by design"):
        paceline.replica(audited).set_hook(hook)


def test_healing_beside_an_optimizer_inside_backward_is_refused_in_either_order() -> None:
    model, other = (paceline.replicate(nn.Linear(2, 2)) for _ in range(2))
    text = "audit\\(heal=True\\) and an optimizer inside backward exclude each other"

    paceline.audit(model, heal=True)
    with pytest.raises(ValueError, match=text):
        paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    paceline.replica(other).step_in_backward(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=text):
        paceline.audit(other, heal=True)


def test_a_model_that_is_not_replicated_is_refused() -> None:
    with pytest.raises(ValueError, match="this Linear is not replicated"):
        paceline.audit(nn.Linear(2, 2))
