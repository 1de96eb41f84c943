"""``replica(model).explain()``: a page that says what is done, whoever asks."""

import functools

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel, Precision, replica, replicate
from paceline.explain import Facts, explain, fitting, shorten, size_of
from paceline.hooks import in_dtype
from paceline.plan import Spec, plan_buckets
from paceline.testing import ranks


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def frozen_net() -> nn.Sequential:
    return net().requires_grad_(False)


def rows(text: str) -> dict[str, str]:
    """Read a page back: the text of each row, without its line breaks."""
    found: dict[str, str] = {}
    name = ""
    for line in text.split("\n\n")[1].splitlines():
        name = line[:15].strip() or name
        found[name] = f"{found.get(name, '')} {line[15:].strip()}".strip()
    return found


def buckets(text: str) -> list[str]:
    return text.split("\n\n")[2].splitlines()[1:]


@ranks(2)
def test_a_page_has_the_world_the_policies_and_the_buckets(rank):
    model = replicate(net())
    text = replica(model).explain()

    assert text.splitlines()[0] == f"Sequential on rank {rank} of 2, over gloo"
    found = rows(text)
    assert found["parameters"] == "6 trained, 0 frozen"
    assert found["hook"] == "average"
    assert found["unused"].startswith("allowed: zeros from a rank without a gradient")
    assert found["buffers"] == "3 (72 B) made rank 0's at the end of each reduced backward"
    assert found["precision"] == "as the parameters are"
    assert found["optimizer"] == "steps after backward()"
    assert found["guard"].startswith("on: ")
    assert found["join"].startswith("not inside join()")
    assert found["plan"].startswith("1 bucket, last registered first, until the first backward shows")
    assert "none after zero_grad()" in found["memory"]
    assert buckets(text) == [
        "       0  cpu     float32          432 B  2.bias, 2.weight, 1.bias, 1.weight, 0.bias, 0.weight"
    ]


@ranks(2)
def test_what_was_learned_and_set_is_shown(rank):
    model = net()
    model[0].bias.requires_grad_(False)
    replicate(
        model,
        hook=in_dtype(torch.bfloat16),
        unused="error",
        guard=False,
        left_out=["2.bias"],
        buffers={"*.running_*": 5, "*": "never"},
    )
    model(torch.arange(24.0).view(4, 6)).sum().backward()

    found = rows(replica(model).explain())
    assert found["parameters"] == "4 trained, 1 frozen; left to each rank: 2.bias"
    assert found["hook"] == "in_dtype(torch.bfloat16, average)"
    assert found["unused"].startswith("a trained parameter without a gradient, on any rank, is an error")
    assert found["guard"].startswith("off: ")
    assert found["buffers"] == (
        "2 (64 B) made rank 0's at one in 5 reduced backwards; 1 (8 B) left to each rank"
    )
    assert found["plan"].startswith("1 bucket, in the order in which gradients were seen to arrive")
    assert "1 step so far" in found["gradients"]


@ranks(2)
def test_an_optimizer_inside_backward_is_shown(rank):
    model = replicate(net())
    replica(model).step_in_backward(torch.optim.AdamW(model.parameters()))

    found = rows(replica(model).explain())
    assert found["optimizer"] == "AdamW, inside backward: each bucket as soon as it is reduced"
    assert found["memory"].startswith("a bucket is freed as soon as it is stepped")


@ranks(2)
def test_join_is_shown_while_it_lasts(rank):
    model = replicate(net())
    with paceline.join(model, divide_by="initial"):
        inside = rows(replica(model).explain())

    assert inside["join"].endswith("divided by the initial number of ranks")
    assert rows(replica(model).explain())["join"].startswith("not inside join()")


@ranks(2)
def test_precision_is_shown(rank):
    model = replicate(net(), precision=Precision(torch.bfloat16, torch.float32))

    found = rows(replica(model).explain())
    assert found["precision"] == (
        "computes in bfloat16, sends gradients in float32; the optimizer sees full precision"
    )


@ranks(2)
@pytest.mark.parametrize("sync", [True, False])
def test_a_wrapper_says_what_it_does_with_buffers(rank, sync):
    model = DistributedDataParallel(net(), forward_sync_buffers=sync)

    words = rows(replica(model).explain())["buffers"]
    assert words.startswith("3, made equal before each forward") == sync


@ranks(2)
def test_sparse_gradients_have_a_line_of_their_own(rank):
    model = replicate(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)))

    text = replica(model).explain()
    assert "1 bucket, and 1 sparse gradient by rows" in rows(text)["plan"]
    assert buckets(text)[-1].split() == ["sparse", "gathered", "by", "rows", "0.weight"]


def test_a_process_alone_is_told_that_nothing_is_sent():
    model = replicate(net())
    text = replica(model).explain()

    assert text.splitlines()[0] == "Sequential on rank 0 of 1, a process alone"
    assert list(rows(text)) == ["parameters", "gradients", "precision", "memory"]
    assert rows(text)["gradients"].endswith("nobody to agree with, so nothing is sent")


def test_a_frozen_parameter_of_a_process_alone_is_not_trained():
    model = net()
    model[0].weight.requires_grad_(False)

    assert rows(replica(replicate(model)).explain())["parameters"] == "5 trained, 1 frozen"


@ranks(2)
@pytest.mark.parametrize("build", [nn.ReLU, frozen_net], ids=["empty", "frozen"])
def test_a_module_with_nothing_to_train_has_a_page(rank, build):
    text = replica(replicate(build())).explain()

    assert rows(text)["gradients"] == "none: nothing is trained here"
    assert "bucket  device" not in text


# ---- pure -------------------------------------------------------------------------------------------


def specs(*shapes: int, name: str = "layer{}.weight") -> list[Spec]:
    cpu = torch.device("cpu")
    return [Spec(name.format(i), (n,), torch.float32, cpu, (1,)) for i, n in enumerate(shapes)]


MIB = 1024 * 1024


def test_pages_that_are_kept_between_steps_are_told():
    plan = plan_buckets(specs(100, 512 * 1024, 16 * MIB))
    text = rows(explain(Facts("Net", 0, 2, plan, backend="gloo")))["memory"]

    assert "2.0 MiB of pages and 64.0 MiB of pages that the kernel may take" in text
    assert text.endswith("largest bucket 64.0 MiB")


@pytest.mark.parametrize("length", [10, 80, 300])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_no_line_is_longer_than_a_hundred_columns(length, count):
    long = "block." * (length // 6)
    plan = plan_buckets(specs(*[MIB] * count, name=long + "{}.weight"))
    facts = functools.partial(Facts, "Net" * length, 7, 16, plan, backend="nccl")

    for page in (explain(facts()), explain(facts(left_out=[long] * 5, hook="powersgd(" + "rank=2, " * 40))):
        assert max(map(len, page.splitlines())) <= 100


def test_many_buckets_are_counted():
    plan = plan_buckets(specs(*[8 * MIB] * 30))
    last = explain(Facts("Net", 0, 2, plan, backend="gloo")).splitlines()[-1]

    assert last.strip() == "and 10 buckets more, 320.0 MiB"


def test_names_are_cut_to_what_fits():
    assert fitting(["a", "b"], 10) == "a, b"
    assert fitting(["first.weight", "second.weight", "third.weight"], 30) == "first.weight and 2 more"
    assert fitting(["encoder.layers.0.weight", "b"], 22) == "enco...ight and 1 more"
    assert len(fitting(["x" * 100], 40)) == 40
    assert shorten("abcdefghij", 7) == "ab...ij"


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (25 * MIB, "25.0 MiB"), (3 * 1024 * MIB, "3.0 GiB")],
)
def test_sizes_read_as_people_write_them(nbytes, words):
    assert size_of(nbytes) == words
