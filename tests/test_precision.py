"""Mixed precision: low inside forward, full everywhere else, and nothing of it in copies or checkpoints."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FsdpMixedPrecision
from torch.nn.parallel.distributed import _MixedPrecision as TorchMixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import casts
from paceline import precision as precision_module
from paceline.precision import LowPrecision, Precision
from paceline.testing import ranks

FULL, LOW = torch.float32, torch.bfloat16
BF16 = Precision(LOW, FULL)


class Net(nn.Module):
    """Notes what its forward sees; can be told to raise, or to checkpoint its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.zeros(16))
        self.reentrant: bool | None = None
        self.error: BaseException | None = None
        self.seen: list[Counter[torch.dtype]] = []

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(Counter(p.dtype for p in self.parameters()))
        # By name, from outside of its owner: a checkpoint has no module to hook on to here.
        return torch.tanh(self.second(x) * self.scale + self.shift.to(x.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input_dtype = x.dtype
        x = torch.tanh(self.first(x))
        x = (
            self.middle(x)
            if self.reentrant is None
            else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        )
        if self.error is not None:
            raise self.error
        return self.last(x)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def low(
    module: nn.Module, precision: Precision = BF16, left_out: frozenset[str] = frozenset()
) -> LowPrecision:
    return LowPrecision(module, precision, left_out)


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(5))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 0.03) -> None:
    """Compare by the distance relative to the length, which is what rounding to 8 bits can move."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype == FULL, name
        assert (got[name] - tensor).norm() <= tolerance * tensor.norm(), name


def assert_plain(model: nn.Module) -> None:
    assert {p.dtype for p in model.parameters()} == {FULL}
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# ---- what forward sees, and what everybody else does -----------------------------------------------


def test_forward_sees_low_precision_and_everybody_else_full() -> None:
    model = net()
    low(model)

    output = model(batch())

    assert model.seen == [{LOW: 7}]
    assert model.input_dtype == output.dtype == LOW
    assert_plain(model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {FULL}


def test_gradients_arrive_in_full_precision_and_are_those_of_full_precision() -> None:
    model, reference = net(), net()
    low(model)

    for m in (model, reference):
        loss_of(m, batch()).backward()

    assert_near(gradients(model), gradients(reference))


def test_the_optimizer_works_on_full_precision() -> None:
    model = net().to(LOW).to(FULL)
    low(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = model.first.weight.detach().clone()

    loss_of(model, batch()).backward()
    optimizer.step()

    state = [value for slots in optimizer.state.values() for value in slots.values() if value.ndim]
    assert {value.dtype for value in state} == {FULL}
    # A step that bfloat16 could not have held.
    assert not torch.equal(model.first.weight, before)
    assert torch.equal(model.first.weight.to(LOW), before.to(LOW))


def test_a_checkpoint_is_in_full_precision_and_can_be_loaded_anywhere() -> None:
    model, other = net(), net()
    low(model)
    loss_of(model, batch()).backward()
    with torch.no_grad():
        model.scale.add_(1e-5)

    other.load_state_dict(model.state_dict())

    assert list(model.state_dict()) == list(net().state_dict())
    assert torch.equal(other.scale, torch.full((16,), 1 + 1e-5))
    model.load_state_dict(net().state_dict())
    assert torch.equal(model.scale, torch.ones(16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_can_be_computed_in(dtype: torch.dtype) -> None:
    model, reference = net(), net()
    low(model, Precision(dtype))

    assert model(batch()).dtype == dtype
    loss_of(model, batch()).backward()
    loss_of(reference, batch()).backward()

    assert_near(gradients(model), gradients(reference))


def test_parameters_that_are_in_the_dtype_already_stay_themselves() -> None:
    model = nn.Linear(4, 4)
    low(model, Precision(FULL))
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight))

    assert model(torch.ones(1, 4, dtype=torch.float64)).dtype == FULL
    assert seen == [model.weight]


def test_left_out_parameters_and_buffers_are_not_touched() -> None:
    model = net()
    model.register_buffer("other", torch.ones(2))
    low(model, Precision(LOW, buffer=LOW), frozenset({"scale", "shift"}))
    seen: dict[str, torch.Tensor] = {}
    model.second.register_forward_hook(lambda *_: seen.update(model.named_parameters()))
    model.second.register_forward_hook(lambda *_: (_[-1]).float())
    model.last.register_forward_pre_hook(lambda _, args: (args[0].to(LOW),))

    model(batch()).sum().backward()

    assert seen["scale"] is model.scale
    assert seen["second.weight"].dtype == LOW
    assert (model.shift.dtype, model.other.dtype) == (FULL, LOW)
    assert model.scale.grad is not None


def test_frozen_parameters_are_cast_without_a_gradient() -> None:
    model = net()
    low(model)
    model.second.requires_grad_(False)
    seen: dict[str, bool] = {}
    handle = model.second.register_forward_hook(
        lambda *_: seen.update({n: p.requires_grad for n, p in model.named_parameters()})
    )

    loss_of(model, batch()).backward()

    assert model.seen == [{LOW: 7}]
    assert not seen["second.weight"]
    assert seen["first.weight"]
    assert "second.weight" not in gradients(model)
    handle.remove()
    model.second.requires_grad_(True)
    loss_of(model, batch()).backward()
    assert "second.weight" in gradients(model)


def test_integers_among_the_parameters_stay_integers() -> None:
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    low(model)
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append((module.codes.dtype, module.weight.dtype)))

    model(torch.ones(1, 4))

    assert seen == [(torch.int64, LOW)]


def test_an_unused_parameter_gets_no_gradient_beside_used_ones() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    low(model)

    model(torch.ones(1, 2)).sum().backward()

    assert model["used"].weight.grad is not None
    assert model["idle"].weight.grad is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.are_tied = self.out.weight is self.embed.weight
        return self.out(self.embed(tokens))


def test_tied_parameters_are_cast_once_and_stay_tied() -> None:
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    low(model)

    with Operators() as operators:
        loss_of(model, torch.arange(5)).backward()
    loss_of(reference, torch.arange(5)).backward()

    assert model.are_tied
    assert operators.count["_foreach_copy_"] == 1
    assert_near(gradients(model), gradients(reference))


def test_a_weight_that_is_used_without_its_module_is_cast_too() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # its attention reads out_proj.weight itself
    reference = copy.deepcopy(model)
    low(model)
    x, weights = torch.randn(3, 2, 8), torch.randn(3, 2, 8)

    for m in (model, reference):
        (m(x).float() * weights).sum().backward()

    got, want = gradients(model), gradients(reference)
    for only_noise in (got, want):  # moving all keys changes no softmax
        only_noise["self_attn.in_proj_bias"][8:16] = 0
    assert_near(got, want)
    model.eval()
    with torch.no_grad():
        assert model(x).dtype == LOW


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_which_hold_their_weights_in_a_list(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, num_layers=2)
    reference = copy.deepcopy(model)
    low(model)
    x = torch.randn(3, 2, 4)

    for _ in range(2):
        for m in (model, reference):
            m.zero_grad()
            m(x)[0].float().square().mean().backward()

    assert_near(gradients(model), gradients(reference), tolerance=0.06)
    assert copy.deepcopy(model)(x)[0].dtype == pickle.loads(pickle.dumps(model))(x)[0].dtype == FULL


def test_sparse_gradients_stay_sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    low(model)

    model(torch.tensor([1, 3])).sum().backward()

    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad.dtype == model[1].weight.grad.dtype == FULL


def test_a_parameter_that_is_replaced_is_read_anew() -> None:
    model = nn.Linear(2, 1, bias=False)
    low(model)
    model.weight = nn.Parameter(torch.full((1, 2), 3.0))

    assert model(torch.ones(1, 2)).item() == 6
    swapped = torch.func.functional_call(model, {"weight": torch.ones(1, 2)}, torch.ones(1, 2))
    assert (swapped.item(), swapped.dtype) == (2, LOW)


def test_strides_are_kept() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    low(model)
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.stride()))

    model(torch.ones(1, 3, 5, 5)).sum().backward()

    assert seen == [model.weight.stride()]


# ---- ways of running ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(mode: Callable[[], Any]) -> None:
    model = net().eval()
    low(model)

    with mode():
        output = model(batch())

    assert output.dtype == LOW
    assert not output.requires_grad
    loss_of(model, batch()).backward()
    assert len(gradients(model)) == 7


def test_gradients_enabled_inside_a_forward_that_has_them_disabled_reach_the_parameters() -> None:
    model = nn.Linear(2, 1, bias=False)
    low(model)
    plain = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            plain(x)
        with torch.enable_grad():
            return plain(x)

    model.forward = forward
    with torch.no_grad():
        output = model(torch.ones(1, 2))
    output.sum().backward()

    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_under_autocast() -> None:
    model, reference = net(), net()
    low(model, Precision(torch.float16))

    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch())
    output.float().square().mean().backward()
    loss_of(reference, batch()).backward()

    assert output.dtype == LOW
    assert_near(gradients(model), gradients(reference))


def test_two_forwards_before_one_backward_and_gradients_that_add_up() -> None:
    model, reference = net(), net()
    low(model)

    for m in (model, reference):
        one, other = loss_of(m, batch()), loss_of(m, batch() + 1)
        (one + other).backward()
        loss_of(m, batch() * 2).backward()

    assert_near(gradients(model), gradients(reference))


def test_a_backward_that_makes_a_graph() -> None:
    model, reference = net(), net()
    low(model)

    for m in (model, reference):
        x = batch().requires_grad_()
        slope = torch.autograd.grad(loss_of(m, x), [x, m.second.weight], create_graph=True)
        sum(part.square().sum() for part in slope).backward()

    got, want = gradients(model), gradients(reference)
    got.pop("last.bias"), want.pop("last.bias")
    assert_near(got, want, tolerance=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_backward_is_computed_in_low_precision(reentrant: bool) -> None:
    model, plain = net(), net()
    low(model)
    low(plain)
    model.reentrant = reentrant

    for m in (model, plain):
        loss_of(m, batch()).backward()

    assert model.seen == [{LOW: 7}, {LOW: 7}]
    assert_near(gradients(model), gradients(plain), tolerance=1e-6)
    assert_plain(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_is_itself_checkpointed(reentrant: bool) -> None:
    model, plain = net(), net()
    low(model)
    low(plain)
    x = batch().requires_grad_()

    checkpoint(model, x, use_reentrant=reentrant).float().square().mean().backward()
    loss_of(plain, x).backward()

    assert_near(gradients(model), gradients(plain), tolerance=1e-6)


def test_a_module_that_calls_itself() -> None:
    model = net()
    low(model)
    inner = model.middle
    depth = []

    def middle(x: torch.Tensor) -> torch.Tensor:
        depth.append(1)
        if len(depth) < 3:
            model(torch.zeros(1, 6))
        return inner(x)

    model.middle = middle
    model(batch())

    assert model.seen == [{LOW: 7}] * 3
    assert_plain(model)


def test_parameters_are_full_for_other_threads_and_threads_do_not_meet() -> None:
    model = net()
    low(model)
    inside, outside = threading.Event(), threading.Event()
    plain = model.middle

    def middle(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert outside.wait(20)
        return plain(x)

    model.middle = middle
    worker = threading.Thread(target=model, args=(batch(),))
    worker.start()
    assert inside.wait(20)
    assert_plain(model)
    model.middle = plain
    assert model(batch()).dtype == LOW
    outside.set()
    worker.join()

    assert model.seen == [{LOW: 7}, {LOW: 7}]


def test_a_part_that_is_called_on_its_own_computes_as_before() -> None:
    model = net()
    low(model)

    assert model.second(torch.ones(1, 16)).dtype == FULL


@pytest.mark.parametrize("what", ["the module", "a part"])
def test_compiled_code_sees_the_same(what: str) -> None:
    model, reference = net(), net()
    low(model)
    (model if what == "the module" else model.second).compile(backend="aot_eager")

    for m in (model, reference):
        for _ in range(2):
            m.zero_grad()
            loss_of(m, batch()).backward()

    assert model(batch()).dtype == LOW
    assert_near(gradients(model), gradients(reference))
    assert_plain(model)


# ---- forwards that end badly ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_parameters_are_full_again_when_forward_raises(error: BaseException) -> None:
    model = net()
    low(model)
    model.error = error

    with pytest.raises(type(error)):
        try:
            model(batch())
        except BaseException:
            assert {tensor.dtype for tensor in model.state_dict().values()} == {FULL}  # for a last checkpoint
            raise

    assert_plain(model)
    model.error = None
    assert model(batch()).dtype == LOW
    assert model.first.weight.dtype == FULL


def test_a_hook_that_raises_before_ours_ends_no_forward() -> None:
    model = net()
    low(model)
    plain = model.middle

    def refuse(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].numel() == 0:
            raise ValueError("empty")

    def middle(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="empty"):
            model(torch.empty(0, 6))
        return plain(x)

    model.middle = middle
    model.register_forward_pre_hook(refuse, prepend=True)
    model(batch())

    assert model.seen == [{LOW: 7}]


# ---- buffers --------------------------------------------------------------------------------------


def with_batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def test_buffers_are_cast_in_place_when_asked_and_at_once() -> None:
    model = with_batch_norm()
    mean = model[1].running_mean

    handle = low(model, Precision(LOW, buffer=LOW))

    assert model[1].running_mean is mean
    assert (mean.dtype, model[1].running_var.dtype) == (LOW, LOW)
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model(batch()).dtype == LOW
    handle.remove()
    assert mean.dtype == FULL


def test_buffers_alone_can_be_cast() -> None:
    model = net()

    low(model, Precision(buffer=torch.float64))

    assert model.shift.dtype == torch.float64
    assert model.first(torch.ones(1, 6)).dtype == FULL


@pytest.mark.parametrize("buffer", [None, FULL])
def test_batch_norm_keeps_its_figures_in_full_precision_unless_asked(buffer: torch.dtype | None) -> None:
    model, reference = with_batch_norm(), with_batch_norm()
    low(model, Precision(LOW, buffer=buffer))
    seen = []
    model[1].register_forward_hook(lambda module, _, out: seen.append((module.weight.dtype, out.dtype)))

    for m in (model, reference):
        loss_of(m, batch(32)).backward()
        m.eval()(batch(32))

    assert seen == [(FULL, LOW)] * 2
    assert model[1].running_mean.dtype == FULL
    assert model[1].num_batches_tracked == 1
    assert (model[1].running_var - reference[1].running_var).norm() < 0.01 * reference[1].running_var.norm()


# ---- inputs ---------------------------------------------------------------------------------------


def test_floating_inputs_are_cast_wherever_they_are() -> None:
    seen: dict[str, Any] = {}

    class Takes(nn.Linear):
        def forward(self, x: Any, *, more: Any) -> Any:
            seen.update(x=x, more=more)
            return super().forward(x[0])

    model = Takes(2, 2)
    low(model)
    ids = torch.arange(2)

    model([torch.ones(1, 2), ids], more={"mask": torch.tensor([True]), "w": (torch.ones(1),)})

    assert seen["x"][0].dtype == seen["more"]["w"][0].dtype == LOW
    assert seen["x"][1] is ids
    assert seen["more"]["mask"].dtype == torch.bool


def test_the_modules_own_hooks_see_what_forward_sees() -> None:
    model = net()
    seen: list[torch.dtype] = []
    model.register_forward_pre_hook(lambda module, args: seen.extend([args[0].dtype, module.scale.dtype]))
    low(model)

    model(batch())

    assert seen == [LOW, LOW]


def test_packed_sequences_are_cast() -> None:
    model = nn.LSTM(4, 5)
    low(model)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])

    output, _ = model(packed)

    assert output.data.dtype == LOW
    assert packed.data.dtype == FULL


def test_gradients_reach_the_inputs_in_their_own_dtype() -> None:
    model = net()
    low(model)
    x = batch().requires_grad_()

    loss_of(model, x).backward()

    assert x.grad.dtype == FULL


def test_inputs_can_be_left_alone() -> None:
    model = net()
    low(model, Precision(LOW, inputs=False))

    with pytest.raises(RuntimeError, match="same dtype"):
        model(batch())
    assert model(batch().to(LOW)).dtype == LOW


# ---- copies, pickles, and the end of it -------------------------------------------------------------


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_a_file]
)
@pytest.mark.parametrize("after_forward", [False, True])
def test_copies_and_pickles_are_plain_modules(
    duplicate: Callable[[nn.Module], nn.Module], after_forward: bool
) -> None:
    model = with_batch_norm()
    low(model)
    if after_forward:
        loss_of(model, batch()).backward()

    other = duplicate(model)

    assert other(batch()).dtype == FULL
    assert all(type(part._parameters) is dict for part in other.modules())
    assert list(other.state_dict()) == list(model.state_dict())
    loss_of(other, batch()).backward()
    low(other)
    assert other(batch()).dtype == model(batch()).dtype == LOW


def test_a_copy_that_is_made_inside_forward_is_in_full_precision() -> None:
    model = net()
    low(model)
    copies: list[nn.Module] = []
    model.second.register_forward_hook(lambda module, *_: copies.append(copy.deepcopy(module)))

    model(batch())

    assert_plain(copies[0])
    assert torch.equal(copies[0].weight, model.second.weight)


def test_pickles_load_where_paceline_is_not_installed() -> None:
    model = nn.Linear(2, 2)
    low(model)
    script = (
        "import pickle, sys, torch; sys.modules['paceline'] = None\n"
        "model = pickle.load(sys.stdin.buffer); print(model(torch.ones(1, 2)).dtype)"
    )

    run = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(model), capture_output=True)

    assert run.stdout.decode().strip() == "torch.float32", run.stderr.decode()


def test_remove_takes_everything_off() -> None:
    model, untouched = with_batch_norm(), with_batch_norm()
    handle = low(model, Precision(LOW, LOW, LOW))
    loss_of(model, batch()).backward()

    handle.remove()
    handle.remove()

    assert model(batch()).dtype == FULL
    for part, other in zip(model.modules(), untouched.modules(), strict=True):
        assert vars(part).keys() == vars(other).keys()
        assert type(part._parameters) is dict
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    low(model)
    assert model(batch()).dtype == LOW


def test_nothing_keeps_the_parameters_alive() -> None:
    model = net()
    handle = low(model)
    loss_of(model, batch()).backward()
    weight = weakref.ref(model.first.weight)
    gc.disable()
    try:
        del model

        assert weight() is None
    finally:
        gc.enable()
    handle.remove()


def test_casts_live_no_longer_than_they_are_needed() -> None:
    model = net()
    low(model)
    seen: list[weakref.ref[torch.Tensor]] = []
    model.second.register_forward_pre_hook(lambda module, _: seen.append(weakref.ref(module.weight)))

    with torch.no_grad():
        model(batch())
    assert seen.pop()() is None

    output = model(batch())
    assert seen[0]() is not None
    output.sum().backward()
    del output
    assert seen.pop()() is None


# ---- what it costs --------------------------------------------------------------------------------


def deep(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def test_many_parameters_are_cast_by_one_operator_each_way() -> None:
    model = deep(30)
    low(model)
    x = torch.ones(1, 4, dtype=LOW)

    with Operators() as forward:
        output = model(x)
    with Operators() as backward:
        output.sum().backward()

    assert forward.count["_foreach_copy_"] == 1
    assert backward.count["_foreach_copy_"] == 1
    assert "_to_copy" not in forward.count | backward.count


def test_batches_are_bounded_in_size_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(model: nn.Module) -> int:
        handle = low(model)
        with Operators() as operators:
            model(torch.ones(1, 4))
        handle.remove()
        return operators.count["_foreach_copy_"]

    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 3 * 40)  # of three layers: 20 numbers each
    assert copies(deep(30)) == 10
    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 1)
    monkeypatch.setattr(precision_module, "BATCHES_AT_MOST", 5)
    assert copies(deep(30)) == 5


def test_a_bias_goes_with_its_weight_however_large_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 1000)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    low(model)

    with Operators() as operators:
        model(torch.ones(1, 30))

    assert operators.count["_foreach_copy_"] == 2


def test_a_part_that_is_not_used_is_not_cast_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 1)
    model = deep(3)
    low(model)
    model.forward = lambda x: model[1](x)

    with Operators() as operators:
        model(torch.ones(1, 4, dtype=LOW))

    assert operators.count["_foreach_copy_"] == 2  # its weight and its bias


def test_gradients_arrive_batch_by_batch_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 40)
    model = deep(3)
    low(model)
    arrived: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    model[0].register_full_backward_pre_hook(lambda *_: arrived.append("backward of 0"))

    model(torch.ones(1, 4, requires_grad=True)).sum().backward()

    assert arrived.index("2.weight") < arrived.index("1.weight") < arrived.index("0.weight")
    assert arrived.index("2.weight") < arrived.index("backward of 0")


# ---- streams, played on a CPU (tests/gpu/precision.py has the real ones) ------------------------------


class Stream:
    """Notes who waits for whom."""

    def __init__(self, device: Any = None, *, name: str = "side", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} casts")
        return f"cast {self.log.count(f'{self.name} casts')}"


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    current = [Stream(name="main", log=log)]

    @contextmanager
    def stream(inner: Stream) -> Iterator[None]:
        current.append(inner)
        yield
        current.pop()

    monkeypatch.setattr(casts, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", partial(Stream, log=log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(precision_module, "BATCH_NBYTES", 40)
    return log


def test_on_a_gpu_casts_are_started_at_once_and_awaited_where_they_are_read(stream_log: list[str]) -> None:
    model = deep(3)
    low(model)
    for place, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, place=place: stream_log.append(f"layer {place}"))

    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()

    once = [
        "side waits for main",
        *["side casts"] * 3,
        *["layer 0", "main waits for cast 1", "layer 1", "main waits for cast 2"],
        *["layer 2", "main waits for cast 3", "main waits for side"],
    ]
    assert stream_log[: len(once)] == once
    assert len(stream_log) == 2 * len(once)


def test_on_a_gpu_nothing_is_left_running_when_forward_raises(stream_log: list[str]) -> None:
    model = net()
    low(model)
    model.error = ValueError("no")

    with pytest.raises(ValueError, match="no"):
        model(batch())

    assert stream_log[-1] == "main waits for side"


# ---- with ranks -----------------------------------------------------------------------------------


@ranks(2)
def test_bf16_with_fp32_reduction_trains_like_fp32(rank: int) -> None:
    """Stated: after 20 steps the loss is within 1 %, and each weight within 2 % of the way that it went."""
    torch.manual_seed(rank)
    model = paceline.replicate(net(), bucket_mb=1e-3)
    start, reference = net(), net()
    low(model)
    x = batch(64)
    target = torch.tanh(x @ torch.randn(6, 4, generator=torch.Generator().manual_seed(9)))
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)}

    for _ in range(20):
        for m, share in ((model, slice(rank, None, 2)), (reference, slice(None))):
            optimizers[m].zero_grad()
            nn.functional.mse_loss(m(x[share]).float(), target[share]).backward()
            optimizers[m].step()
    with torch.no_grad():
        losses = {m: nn.functional.mse_loss(m(x).float(), target).item() for m in (model, reference)}

    assert losses[model] == pytest.approx(losses[reference], rel=0.01)
    for name, want in reference.named_parameters():
        got, begin = model.get_parameter(name), start.get_parameter(name)
        assert got.dtype == FULL
        assert (got - want).norm() < 0.02 * (want - begin).norm(), name


@ranks(2)
def test_every_rank_has_the_same_gradients_unused_parameters_included(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("all", "one", "none")})
    model.forward = lambda x: model["one"](model["all"](x)) if rank else model["all"](x)
    paceline.replicate(model)
    low(model)

    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        for name in ("all", "one"):
            mine = model[name].weight.grad
            assert mine.dtype == FULL
            both = [torch.empty_like(mine) for _ in range(2)]
            torch.distributed.all_gather(both, mine)
            assert torch.equal(both[0], both[1])
        assert model["none"].weight.grad is None


@ranks(2)
def test_checkpointing_accumulation_and_detaching_with_ranks(rank: int) -> None:
    model, reference = net(), net()
    paceline.replicate(model)
    handle = low(model)
    model.reentrant = bool(rank)  # each rank in its own way

    with paceline.accumulate(model, 2):
        loss_of(model, batch().chunk(2)[rank]).backward()
        loss_of(model, batch().chunk(2)[rank] + 1).backward()
    loss_of(reference, batch()).backward()
    loss_of(reference, batch() + 1).backward()

    assert_near(gradients(model), gradients(reference))
    handle.remove()
    assert model(batch()).dtype == FULL


# ---- bad input ------------------------------------------------------------------------------------


def test_dtypes_have_to_be_floating_point() -> None:
    with pytest.raises(ValueError) as caught:
        Precision(reduce=torch.int8)
    assert str(caught.value) == (
        "mixed precision needs floating-point dtypes that layers compute in, such as torch.bfloat16, but "
        "reduce is torch.int8"
    )
    with pytest.raises(ValueError, match="but param is torch.float8_e4m3fn"):
        Precision(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="but buffer is torch.complex64"):
        Precision(buffer=torch.complex64)
    with pytest.raises(
        TypeError, match=r"param has to be a dtype such as torch.bfloat16, or None, got 'bf16'"
    ):
        Precision("bf16")


def test_torchs_configuration_is_understood() -> None:
    half = torch.float16

    assert Precision.of(TorchMixedPrecision(half, FULL, LOW)) == Precision(half, FULL, LOW)
    assert Precision.of(TorchMixedPrecision(param_dtype=half)) == Precision(half, half)
    assert Precision.of(TorchMixedPrecision(reduce_dtype=half)) == Precision(reduce=half)
    assert Precision.of(TorchMixedPrecision()) == Precision()
    assert Precision.of(BF16) is BF16
    fsdp = FsdpMixedPrecision(half, cast_forward_inputs=False)
    assert Precision.of(fsdp) == Precision(half, half, inputs=False)


def test_other_configurations_are_refused() -> None:
    with pytest.raises(TypeError) as caught:
        Precision.of(torch.float16)
    assert str(caught.value) == (
        "mixed_precision has to be a paceline.Precision or torch's _MixedPrecision, got dtype"
    )
    asks_more = SimpleNamespace(
        param_dtype=LOW, reduce_dtype=None, keep_low_precision_grads=True, output_dtype=FULL
    )
    with pytest.raises(ValueError) as caught_too:
        Precision.of(asks_more)
    assert str(caught_too.value) == (
        "mixed precision does not take keep_low_precision_grads, output_dtype: gradients are handed over in "
        "the parameters' own dtype, and outputs stay as the module computed them. Leave it out"
    )


def test_a_module_of_integers_is_refused() -> None:
    model = nn.Identity()
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)

    with pytest.raises(ValueError) as caught:
        low(model)

    assert str(caught.value) == (
        "mixed precision casts floating-point parameters, and this Identity has only codes (int64). Train it "
        "without mixed precision"
    )
    low(model, Precision(reduce=LOW))


def test_complex_parameters_are_refused_unless_left_out() -> None:
    model = nn.Linear(2, 2)
    model.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    with pytest.raises(ValueError) as caught:
        low(model)

    assert str(caught.value) == (
        "mixed precision cannot cast complex parameters: waves (complex64). Leave them out by name, or hold "
        "their real and imaginary parts as floating-point parameters"
    )
    low(model, left_out=frozenset({"waves"}))
    assert model(torch.ones(1, 2)).dtype == LOW


def test_a_module_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        low(nn.ModuleDict({"a": nn.Linear(1, 1)}))

    assert str(caught.value) == (
        "mixed precision begins where a module is called, and ModuleDict has no forward. Give it to each of "
        "the parts that are called"
    )


@pytest.mark.parametrize("inner", ["Sequential", "1"])
def test_twice_is_refused(inner: str) -> None:
    model = deep(2)
    low(model if inner == "Sequential" else model[1])

    with pytest.raises(ValueError) as caught:
        low(model)

    named = "0, 1" if inner == "Sequential" else "1"
    assert str(caught.value) == (
        f"{named} computes in mixed precision already; remove() that first, or give it to the outer module "
        "only"
    )


@pytest.fixture
def scripted() -> Iterator[nn.Module]:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        yield torch.jit.script(nn.Linear(2, 2))


def test_scripted_modules_are_refused(scripted: nn.Module) -> None:
    with pytest.raises(ValueError) as caught:
        low(nn.Sequential(scripted))

    assert str(caught.value) == (
        "mixed precision cannot reach the parameters of 0: they are not held in Python. Use the modules that "
        "these were scripted from"
    )


def test_a_refused_module_is_left_as_it_was() -> None:
    model = nn.Sequential(with_batch_norm(), nn.ParameterList([torch.ones(1, dtype=torch.complex64)]))

    with pytest.raises(ValueError, match="complex"):
        low(model, Precision(LOW, buffer=LOW))

    assert model[0][1].running_mean.dtype == FULL
    assert type(model[0][0]._parameters) is dict
