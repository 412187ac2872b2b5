"""Which words come of what was put to use, and in which order; and whether torch has what the table names."""

from __future__ import annotations

import importlib
import inspect
import itertools

import pytest

from ddtrace_pytorch.identity.mesh import Place
from ddtrace_pytorch.training.frameworks import FRAMEWORKS, KINDS, TRAINERS, Makeup, Use
from ddtrace_pytorch.training.signs import SIGNS

DDP = Use("ddp", ("ddp",))
FSDP = Use("fsdp", ("fsdp",))
ZERO = Use("zero", ("zero",))
DEEPSPEED = Use("deepspeed", ("zero",))
TP = Use("tp", ("tp",))
PP = Use("pp", ("pp",))
MEGATRON = Use("megatron", ("tp", "pp"), "megatron")

CASES: list[tuple[list[Use], dict[str, str]]] = [
    ([], {}),
    ([Use()], {"framework": "none"}),
    ([DDP], {"framework": "ddp", "pytorch.parallelism": "ddp"}),
    ([Use("ddp")], {"framework": "ddp"}),  # of one rank
    ([ZERO], {"framework": "zero", "pytorch.parallelism": "zero"}),
    ([TP], {"framework": "tp", "pytorch.parallelism": "tp"}),
    ([PP], {"framework": "pp", "pytorch.parallelism": "pp"}),
    ([DDP, TP], {"framework": "ddp", "pytorch.parallelism": "ddp+tp"}),
    ([FSDP, TP, PP], {"framework": "fsdp", "pytorch.parallelism": "fsdp+tp+pp"}),
    ([DDP, ZERO], {"framework": "ddp", "pytorch.parallelism": "ddp+zero"}),
    ([DDP, DEEPSPEED], {"framework": "deepspeed", "pytorch.parallelism": "ddp+zero"}),
    (
        [MEGATRON, Use("megatron", ("ddp",), "megatron")],
        {"framework": "megatron", "pytorch.parallelism": "ddp+tp+pp", "pytorch.trainer": "megatron"},
    ),
    (
        [Use(trainer="accelerate"), DDP, Use(trainer="transformers")],
        {"framework": "ddp", "pytorch.parallelism": "ddp", "pytorch.trainer": "transformers+accelerate"},
    ),
    ([Use(trainer="lightning")], {"framework": "none", "pytorch.trainer": "lightning"}),
]


@pytest.mark.parametrize(("uses", "facts"), CASES)
def test_the_words_are_the_same_in_whatever_order_things_were_used(uses: list[Use], facts: dict[str, str]) -> None:
    for order in itertools.permutations(uses):
        makeup = Makeup()
        for use in order:
            makeup.add(use)
        assert makeup.facts() == facts


def test_only_news_is_news() -> None:
    makeup = Makeup()
    assert makeup.add(DDP)
    assert not makeup.add(DDP)
    assert makeup.add(Use(trainer="lightning"))
    assert not makeup.add(Use("ddp", trainer="lightning"))
    assert makeup.add(Use(places=(Place("dp", 1, 2, 2),)))
    assert not makeup.add(Use(places=(Place("dp", 1, 2, 2),)))
    assert makeup.facts()["pytorch.mesh.dp"] == 1


def test_every_word_that_the_built_in_knows_is_stronger_than_every_new_one() -> None:
    built_in = [word for word in FRAMEWORKS if word in ("ddp", "fsdp", "deepspeed")]
    assert built_in == ["ddp", "fsdp", "deepspeed"]
    assert list(FRAMEWORKS[-3:]) == built_in
    assert FRAMEWORKS[0] == "none"


@pytest.mark.parametrize("words", [FRAMEWORKS, KINDS, TRAINERS])
def test_no_word_twice_and_none_that_reads_as_two(words: tuple[str, ...]) -> None:
    assert len(set(words)) == len(words)
    assert not [word for word in words if "+" in word]


def test_no_sign_twice() -> None:
    assert len({(sign.module, sign.name) for sign in SIGNS}) == len(SIGNS)


# Where one release or another has it: of each set, this torch has one.
PLACES = [
    {"torch.nn.parallel.distributed"},
    {"torch.distributed.fsdp.fully_sharded_data_parallel"},
    {"torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.fsdp.fully_shard"},
    {"torch.distributed.optim.zero_redundancy_optimizer"},
    {"torch.distributed.pipelining.stage"},
    {"torch.distributed.tensor.parallel.api"},
    {"torch.distributed.tensor._api", "torch.distributed._tensor.api"},
    {"torch.distributed.device_mesh"},
    {"torch.distributed._composable.replicate_with_fsdp"},
]


@pytest.mark.parametrize("modules", PLACES, ids=lambda modules: min(modules))
def test_torch_has_what_the_table_names_where_the_table_says(modules: set[str]) -> None:
    pytest.importorskip("torch")
    found = []
    for sign in SIGNS:
        if sign.module not in modules:
            continue
        try:
            module = importlib.import_module(sign.module)
        except ImportError:
            continue
        owner, _, name = sign.name.rpartition(".")
        thing = vars(getattr(module, owner))[name] if owner else inspect.unwrap(getattr(module, name))
        assert inspect.isfunction(thing), sign
        found += [sign] if thing.__globals__ is vars(module) else []
    assert len(found) == 1


def test_every_sign_of_torch_is_looked_for_above() -> None:
    torchs = {sign.module for sign in SIGNS if sign.module.partition(".")[0] == "torch"}
    assert torchs == set().union(*PLACES)
