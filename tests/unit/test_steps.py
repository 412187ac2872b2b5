"""When a step ends, by the real optimizers of the torch at hand; what it took, by readings made up."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.steps import Steps


class Reading(NamedTuple):
    at: int
    data: int
    collective: int
    optimizer: int
    garbage: int


class Listener:
    def __init__(self) -> None:
        self.steps: list[tuple[Step, Reading, Reading]] = []
        self.turns = 0

    def ended(self, step: Step, start: tuple[int, ...], end: tuple[int, ...]) -> None:
        self.steps.append((step, Reading(*start), Reading(*end)))

    def turned(self) -> None:
        self.turns += 1

    @property
    def numbers(self) -> list[int | None]:
        return [step.number for step, *_ in self.steps]


class Watched:
    """Steps that are watched, and who hears of them."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.opened = self.every = 0
        self.steps = Steps(self.progress, self._first, self._each)
        self.heard = self.steps.listener = Listener()
        self.undo = self.steps.watch()

    def _first(self) -> None:
        self.opened += 1

    def _each(self) -> None:
        self.every += 1

    def ended(self) -> list[int | None]:
        self.steps.leave()
        return self.heard.numbers


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.undo()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def train(net: torch.nn.Module, optimizer: Optimizer, steps: int = 1, accumulate: int = 1) -> None:
    for _ in range(steps):
        for _ in range(accumulate):
            net(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def lbfgs(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3)).square().sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)  # type: ignore[no-any-return]


def plain(kind: Callable[..., Optimizer], **settings: object) -> Callable[[torch.nn.Module], Callable[[], None]]:
    def prepare(net: torch.nn.Module) -> Callable[[], None]:
        optimizer = kind(net.parameters(), **settings)
        return lambda: train(net, optimizer)

    return prepare


def accumulated(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = SGD(net.parameters(), lr=0.1)
    return lambda: train(net, optimizer, accumulate=4)


def scaled(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(net(torch.ones(3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def gan(net: torch.nn.Module) -> Callable[[], None]:
    other = model()
    optimizers = SGD(net.parameters(), lr=0.1), AdamW(other.parameters())

    def step() -> None:
        train(net, optimizers[0])
        train(other, optimizers[1])

    return step


def in_backward(net: torch.nn.Module) -> Callable[[], None]:
    of = {parameter: SGD([parameter], lr=0.1) for parameter in net.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        of[parameter].step()
        of[parameter].zero_grad()

    for parameter in of:
        parameter.register_post_accumulate_grad_hook(hook)
    return lambda: net(torch.ones(3)).sum().backward()  # type: ignore[no-any-return]


class Calling(SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


def compiled(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = AdamW(net.parameters(), lr=torch.tensor(0.1), capturable=False)
    step = torch.compile(optimizer.step, backend="eager")

    def one() -> None:
        net(torch.ones(3)).sum().backward()
        step()

    return one


def compiled_whole(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = SGD(net.parameters(), lr=0.1)
    return torch.compile(lambda: train(net, optimizer), backend="eager")


KINDS = {
    "sgd": plain(SGD, lr=0.1),
    "adam": plain(torch.optim.Adam),
    "adamw": plain(AdamW),
    "foreach": plain(AdamW, foreach=True),
    "fused": plain(AdamW, fused=True),
    "lbfgs": lbfgs,
    "calls super().step()": plain(Calling, lr=0.1),
    "gradient accumulation": accumulated,
    "gradient scaler": scaled,
    "two optimizers": gan,
    "optimizer in backward": in_backward,
    "compiled": compiled,
    "compiled with what is around it": compiled_whole,
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_of_the_user_is_one_step(watched: Watched, kind: str) -> None:
    step = KINDS[kind](model())
    for _ in range(5):
        step()
    assert watched.ended() == [1, 2, 3, 4, 5]
    assert watched.heard.turns == 5
    assert watched.opened == 1
    assert watched.every >= 5


def test_of_two_phases_with_an_optimizer_each_every_step_is_one(watched: Watched) -> None:
    net = model()
    train(net, SGD(net.parameters(), lr=0.1), 5)
    train(net, AdamW(net.parameters()), 5)
    assert watched.ended() == list(range(1, 11))


def test_an_optimizer_made_where_another_died_is_another(watched: Watched) -> None:
    net = model()
    ids: set[int] = set()
    optimizer = None
    while optimizer is None or id(optimizer) not in ids:
        ids.add(id(optimizer))
        assert len(ids) < 1_000, "no id came twice: this tests nothing"
        del optimizer
        gc.collect()
        optimizer = SGD(net.parameters(), lr=0.1)
        train(net, optimizer, 2)
    assert watched.ended() == list(range(1, 2 * len(ids) + 1))


def test_a_critic_that_steps_five_times_is_five_steps_unless_the_user_counts(watched: Watched) -> None:
    nets = model(), model()
    critic, generator = (SGD(net.parameters(), lr=0.1) for net in nets)
    train(nets[0], critic, 5)
    train(nets[1], generator)
    train(nets[0], critic)
    assert watched.ended() == [1, 2, 3, 4, 5, 6]  # the fifth has the generator's in it


@pytest.mark.parametrize("fetches", [True, False])
def test_a_step_of_the_users_own_counting_holds_all_that_steps_in_it(watched: Watched, fetches: bool) -> None:
    nets = model(), model()
    critic, generator = (SGD(net.parameters(), lr=0.1) for net in nets)
    watched.steps.set(1234)
    train(nets[0], critic)
    for number in (1235, 1236, 1240):
        if fetches:
            watched.steps.fetched(*itertools.repeat(watched.steps._reading(0)[0], 2))
        watched.steps.set(number, relative_step := number - 1233)
        assert (watched.progress.step.number, watched.progress.step.relative) == (number, relative_step)
        train(nets[0], critic, 5)
        train(nets[1], generator)
    assert watched.ended() == [1234, 1235, 1236, 1240]


def test_a_number_set_once_goes_on_by_itself(watched: Watched) -> None:
    watched.steps.set(1234)
    net = model()
    train(net, SGD(net.parameters(), lr=0.1), 3)
    assert watched.ended() == [1234, 1235, 1236]
    assert [step.relative for step, *_ in watched.heard.steps] == [1, 2, 3]


def test_steps_of_a_process_without_an_optimizer(watched: Watched) -> None:
    assert watched.progress.step.number is None
    for number in (7, 7, 8, 9):
        watched.steps.set(number)
    assert watched.ended() == [7, 8]
    assert watched.progress.step.number == 9
    watched.steps.leave(over=True)
    assert watched.heard.numbers == [7, 8, 9], "the last one is over with the process"


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_last_step_of_the_users_own_counting_lasts_on_after_its_optimizer(
    watched: Watched, interrupted: bool
) -> None:
    optimizer = SGD((net := model()).parameters(), lr=0.1)
    for number in (100, 101, 102):
        watched.steps.set(number)
        train(net, optimizer)
    stepped = time.monotonic_ns()
    step, start, now = watched.steps.leave(over=True, interrupted=interrupted)
    if interrupted:
        assert watched.heard.numbers == [100, 101]
        assert step is watched.progress.step
        assert step.number == 102, "nobody has begun another"
        assert start[0] < stepped < now[0]
    else:
        assert watched.heard.numbers == [100, 101, 102]
        assert watched.heard.steps[-1][2].at > stepped


def test_what_the_user_numbers_first_begins_there(watched: Watched) -> None:
    watched.steps.begin_anew(1)
    before, began = watched.progress.step, watched.steps._started
    watched.progress.tag("loaded")
    assert not watched.steps.known
    watched.steps.set(1)
    assert watched.steps.known
    assert watched.steps._started > began, "to start up is no part of it"
    assert before.number is None
    assert not watched.progress.step.tags
    train(net := model(), SGD(net.parameters(), lr=0.1), 2)
    assert watched.ended() == [1, 2]


def test_a_first_batch_begins_the_first_step(watched: Watched) -> None:
    watched.steps.begin_anew(1)
    for at in (100, 200):
        watched.steps.fetched(at, at + 1, data=1)
    assert not watched.steps.known
    train(net := model(), SGD(net.parameters(), lr=0.1))
    assert watched.steps.known
    assert watched.ended() == [1]
    assert [start.at for _, start, _ in watched.heard.steps] == [100]


def test_a_number_set_before_the_session_is_its_first(watched: Watched) -> None:
    watched.steps.set(500)
    watched.steps.begin_anew(1)
    assert (watched.progress.step.number, watched.progress.step.relative) == (500, 1)


def test_a_step_that_raised_is_none(watched: Watched) -> None:
    class Failing(SGD):
        fails = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fails:
                raise MemoryError
            super().step()

    net = model()
    optimizer = Failing(net.parameters(), lr=0.1)
    for fails in (True, False, True, True, False, False):
        optimizer.fails = fails
        try:
            train(net, optimizer)
        except MemoryError:
            pass
    assert watched.ended() == [1, 2, 3]


def test_an_engine_steps_once_however_many_optimizers_do(watched: Watched) -> None:
    class Engine:
        """As DeepSpeed's: steps its inner optimizer once for each group of parameters, and some times not at all."""

        def __init__(self) -> None:
            self.net = model()
            self.inner = SGD(self.net.parameters(), lr=0.1)

        def step(self, many: int) -> None:
            watched.steps.engine_entered(self)
            well = False
            try:
                for _ in range(many):
                    self.inner.step()
                well = True
            finally:
                watched.steps.engine_left(well)

    engine = Engine()
    for many in (0, 3, 0, 3, 3, 0):
        engine.step(many)
    assert watched.ended() == [1, 2, 3]
    assert watched.heard.turns == 3


def test_the_next_batch_belongs_to_the_next_step(watched: Watched) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    watched.steps.begin_anew(1)
    labels = []
    for _ in range(3):
        now = Reading(*watched.steps._reading(0))
        watched.steps.fetched(10 * len(labels) + 3, 10 * len(labels) + 8)
        labels.append(watched.progress.step.number)
        assert Reading(*watched.steps._reading(0)).data == now.data + 5
        train(net, optimizer)
        labels.append(watched.progress.step.number)
    assert labels == [1, 1, 2, 2, 3, 3]
    assert watched.ended() == [1, 2, 3]
    ends = [end.at for _, _, end in watched.heard.steps]
    assert ends[:2] == [23, 43]  # where the next was asked for
    assert [end.data - start.data for _, start, end in watched.heard.steps] == [5, 5, 5]
    kept = [step for step, *_ in watched.heard.steps]
    assert len(set(kept)) == 3


def test_where_nobody_asks_for_batches_the_next_step_begins_with_the_optimizer(watched: Watched) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    watched.steps.begin_anew(1)
    labels = []
    for _ in range(4):
        labels.append(watched.progress.step.number)
        train(net, optimizer)
    assert labels == [1, 1, 3, 4]  # after the first nobody can know whether another optimizer steps in it
    assert watched.ended() == [1, 2, 3, 4]


def test_a_batch_for_the_second_of_two_optimizers_ends_no_step(watched: Watched) -> None:
    nets = model(), model()
    optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            watched.steps.fetched(1, 2)
            train(net, optimizer)
    assert watched.ended() == [1, 2, 3]


def test_optimizer_time_is_less_the_collectives_in_it(watched: Watched) -> None:
    inside = iter(itertools.count(0, 10**12))
    watched.steps.collectives = lambda: next(inside)
    net = model()
    train(net, SGD(net.parameters(), lr=0.1))
    assert watched.ended() == [1]
    ((_, start, end),) = watched.heard.steps
    assert end.optimizer == start.optimizer == 0
    assert end.collective > start.collective


def test_nothing_of_ours_is_left_in_torch() -> None:
    from torch.optim import optimizer as module

    before = dict(module._global_optimizer_pre_hooks), dict(module._global_optimizer_post_hooks)
    watched = Watched()
    step = compiled(model())
    step()
    watched.undo()
    assert before == (dict(module._global_optimizer_pre_hooks), dict(module._global_optimizer_post_hooks))
    step()
    assert watched.every == 1


class Loaders:
    """Loaders that are iterated; each fetch takes one and comes ten after the one before."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.net = model()
        self.optimizer = SGD(self.net.parameters(), lr=0.1)
        self.now = 0
        watched.steps.begin_anew(1)

    def fetch(self, *sources: int, exhausted: bool = False) -> None:
        for source in sources:
            self.now += 10
            self.watched.steps.fetched(self.now, self.now + 1, source, exhausted)

    def train(self, *sources: int, steps: int = 1) -> None:
        for _ in range(steps):
            self.fetch(*sources)
            train(self.net, self.optimizer)

    def evaluate(self, source: int, to_the_end: bool = True) -> None:
        self.fetch(*[source] * 5)
        if to_the_end:
            self.fetch(source, exhausted=True)

    def ended(self) -> list[tuple[int | None, list[str], int]]:
        self.watched.steps.leave()
        return [
            (step.number, list(step.tags), (end.data - start.data)) for step, start, end in self.watched.heard.steps
        ]


@pytest.mark.parametrize("to_the_end", [True, False])
@pytest.mark.parametrize("sources", [(1,), (1, 2)])
@pytest.mark.parametrize("anew", [False, True])
def test_an_evaluation_is_part_of_the_step_that_it_follows(
    watched: Watched, to_the_end: bool, sources: tuple[int, ...], anew: bool
) -> None:
    """`anew`: the loaders of each epoch are others."""
    loaders, many = Loaders(watched), len(sources)
    evaluation = [50, 60, 70]
    for epoch in range(3):
        loaders.train(*(source + anew * 10 * epoch for source in sources), steps=4)
        loaders.fetch(sources[0] + anew * 10 * epoch, exhausted=True)
        loaders.evaluate(evaluation[epoch], to_the_end)
        watched.progress.tag(f"evaluated {watched.progress.step.number}")
    evaluated = 5 + to_the_end
    expected = []
    for number in range(1, 13):
        tags = [f"evaluated {number}"] if number % 4 == 0 else []
        # What comes after the last step is none of it.
        expected.append((number, tags, many + (1 + evaluated if tags and number < 12 else 0)))
    assert loaders.ended() == expected


def test_who_evaluates_in_the_middle_of_an_epoch_goes_on_where_it_was(watched: Watched) -> None:
    loaders = Loaders(watched)
    for _ in range(3):
        loaders.train(1, steps=2)
        loaders.evaluate(9)
    assert [data for *_, data in loaders.ended()] == [1, 7, 1, 7, 1, 1]


def test_a_batch_may_do_for_several_steps(watched: Watched) -> None:
    loaders = Loaders(watched)
    for _ in range(3):
        loaders.train(1)
        loaders.train(steps=2)
    assert [(number, data) for number, _, data in loaders.ended()] == [
        (number, int(number % 3 == 1)) for number in range(1, 10)
    ]
