"""The life of a plan: a guess at first, learned from the first backward, and better from time to time.

Every change follows from what all ranks know, so that all of them come to the same plan at the same backward.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from paceline.hooks import Hook, StatefulHook
from paceline.plan import Caps, Plan, Spec, Wishes, plan_buckets
from paceline.recorder import Recorder
from paceline.shelf import Layout
from paceline.tally import Outcome

Named = Sequence[tuple[str, torch.Tensor]]


class Planner:
    """Owns the plan of one replica, and what is known about the use of its parameters."""

    def __init__(self, named: Named, caps: Caps, wishes: Wishes, hook: Hook, recorder: Recorder) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._caps = caps
        self._wishes = self.first_wishes = wishes
        self._hook = hook
        self._recorder = recorder
        self.is_guess = True  # no backward has shown yet in which order gradients arrive
        self.is_disputed = False  # the ranks have had different ones
        self.missing: Mapping[int, Sequence[int]] | None = None  # by parameter, who did not use it last time
        self.is_use_constant = True
        self._unused: frozenset[int] = frozenset()
        self._misses: Counter[int] = Counter()
        self._backwards = 0  # on the present plan
        self.plan_from_scratch()

    # ---- plans are made --------------------------------------------------------------------------

    def plan_from_scratch(self) -> None:
        """Plan as at the start: what every rank can do alike, whatever came before."""
        self.is_guess = True
        self._take(self._plan_for(self._trainable()[::-1]))
        self.is_disputed = False
        self._unused = frozenset()

    def start_anew(self) -> None:
        """Forget what was learned: other ranks know nothing of it."""
        self.missing, self._wishes = None, self.first_wishes
        self.plan_from_scratch()

    def set_caps(self, caps: Caps) -> None:
        """Plan with other bucket sizes, in the order that is known."""
        self._caps = caps
        self._take(self._plan_for(self.plan.basis))

    def notice_changes(self) -> None:
        """Plan anew if parameters were frozen or unfrozen; every rank does so at the same backward."""
        if self.is_disputed:
            self.plan_from_scratch()
            return
        self._take_saved_plan()
        if not self._unused and not self._left_out:
            return
        frozen = any(not self._parameters[index].requires_grad for index in self._unused)
        if not frozen and not any(parameter.requires_grad for parameter in self._left_out):
            return
        trainable = self._trainable()
        kept = [index for index in self.plan.members if index in set(trainable)]
        new = [index for index in reversed(trainable) if index not in set(kept)]
        self.is_guess = True
        self._take(self._plan_for([*kept, *new]))

    def _trainable(self) -> list[int]:
        return [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]

    def _plan_for(self, order: Sequence[int]) -> Plan:
        specs = [spec_of(name, p) for name, p in zip(self._names, self._parameters, strict=True)]
        return plan_buckets(specs, self._caps, order=order, wishes=self._wishes)

    def _take(self, plan: Plan) -> None:
        self.plan = plan
        self._recorder.plans(plan.digest)
        self.layout = Layout(plan, self._parameters, is_learned=not self.is_guess)
        planned = set(plan.members)
        self._left_out = [p for index, p in enumerate(self._parameters) if index not in planned]
        self._misses.clear()
        self._backwards = 0
        self._note()

    # ---- a hook that remembers -------------------------------------------------------------------

    def set_hook(self, hook: Hook) -> None:
        """Plan for another hook from now on."""
        self._hook = hook
        self._note()

    def _note(self) -> None:
        """Let the hook know the order that it has to save."""
        if isinstance(self._hook, StatefulHook) and not self.is_guess:
            self._hook.planned = tuple(self._names[index] for index in self.plan.basis)

    def _take_saved_plan(self) -> None:
        """Go on with the plan of a saved run, where a hook's memory depends on it."""
        hook = self._hook
        if not isinstance(hook, StatefulHook) or hook.plan_to_take is None:
            return
        places = {name: index for index, name in enumerate(self._names)}
        order = [places[name] for name in hook.plan_to_take if name in places]
        hook.plan_to_take = None
        if sorted(order) == sorted(self.plan.members):
            self.is_guess = False
            self._take(self._plan_for(order))

    # ---- the plan gets better --------------------------------------------------------------------

    def learn_from(self, outcome: Outcome) -> None:
        """Re-plan from what all ranks know, so that all come to the same plan."""
        self.is_use_constant &= self.missing in (None, outcome.missing)
        self.missing = outcome.missing
        self._unused = outcome.missing_everywhere
        if outcome.sparse:
            self._wishes = dataclasses.replace(self._wishes, sparse=self._wishes.sparse | outcome.sparse)
            self._take(self.plan.with_sparse(outcome.sparse))
            return
        if outcome.arrival:
            self.is_guess = False
            self._take(self.plan.reordered(outcome.arrival))
            return
        if outcome.missing:
            self._misses.update(outcome.missing.keys())
        self._backwards += 1
        if self._misses and self._backwards >= 8 and self._backwards & (self._backwards - 1) == 0:
            often = {index: count / self._backwards for index, count in self._misses.items()}
            better = self.plan.with_late(often)
            if better.digest != self.plan.digest:
                self._take(better)

    @property
    def learned(self) -> bytes:
        """What the plan follows from, now and later; the same on all ranks that have seen the same steps."""
        misses = sorted(self._misses.items())
        missing = sorted((self.missing or {}).items())
        known = (self.is_guess, self._backwards, misses, missing, sorted(self._wishes.sparse))
        return self.plan.digest + repr(known).encode()

    def uses(self, everyone: int) -> list[int]:
        """Count, for each parameter that has a gradient to travel, the ranks that used it last time."""
        return [everyone - len((self.missing or {}).get(i, ())) for i in sorted(self.plan.members)]


def spec_of(name: str, parameter: torch.Tensor) -> Spec:
    """Describe a parameter to the plan, with the strides that its gradient is going to have."""
    strides = parameter.stride()
    if not _fills_its_memory(parameter):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return Spec(name, tuple(parameter.shape), parameter.dtype, parameter.device, tuple(strides))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements lie in one gapless block, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
