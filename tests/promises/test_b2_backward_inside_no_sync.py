"""B2: forward outside, backward inside ``no_sync``."""

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, LOCAL, batch, reference, share, verdict
from tests.promises.scenarios import b2_backward_inside_no_sync, loss_of, small_model


@on_both
@ranks(2)
def test_a_backward_inside_no_sync_stays_local_wherever_its_forward_was(library: Library) -> None:
    assert b2_backward_inside_no_sync(library) == LOCAL


@on_both
@ranks(2)
def test_the_end_of_an_inner_no_sync_does_not_end_the_outer_one(library: Library) -> None:
    model = small_model()
    whole = reference(model, lambda m: loss_of(m, batch()).backward())
    local = reference(model, lambda m: loss_of(m, share(batch())).backward())
    wrapped = library.wrap(model)

    with library.no_sync(wrapped):
        with library.no_sync(wrapped):
            pass
        loss_of(wrapped, share(batch())).backward()
    assert verdict(wrapped, whole, local) == LOCAL

    wrapped.zero_grad()
    loss_of(wrapped, share(batch())).backward()
    assert verdict(wrapped, whole, local) == EQUAL


@on_both
@ranks(2)
def test_an_exception_inside_no_sync_ends_it(library: Library) -> None:
    model = small_model()
    whole = reference(model, lambda m: loss_of(m, batch()).backward())
    wrapped = library.wrap(model)
    try:
        with library.no_sync(wrapped):
            raise KeyError("the data loader")
    except KeyError:
        pass

    loss_of(wrapped, share(batch())).backward()

    assert verdict(wrapped, whole) == EQUAL


@ranks(2)
def test_torch_reduces_anyway() -> None:
    assert b2_backward_inside_no_sync(TORCH) == f"reduced anyway: {EQUAL}"
