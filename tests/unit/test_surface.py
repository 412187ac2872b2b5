"""The table of operations against the torch at hand: what it says is there, and there is nothing beside it."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddtrace_pytorch.collectives import sizes
from ddtrace_pytorch.collectives.surface import OPERATIONS, PASSED_ON, Kind, Operation, release_of
from ddtrace_pytorch.ledger import Group

RELEASE = release_of(torch.__version__)
HERE = [operation for operation in OPERATIONS if operation.exists_in(RELEASE)]

# Functions of torch.distributed that take a group or a list of transfers and move nothing between ranks.
NO_COLLECTIVES = {
    "abort_process_group", "destroy_process_group", "get_backend", "get_backend_config", "get_backend_impl",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
    "get_world_size",
    "init_process_group", "is_initialized", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
    "record_comm", "shrink_group", "set_timeout", "split_group", "supports_complex",
}  # fmt: skip


@pytest.mark.parametrize("operation", HERE, ids=lambda operation: operation.function)
def test_the_parameters_are_those_of_this_torch(operation: Operation) -> None:
    function = getattr(dist.distributed_c10d, operation.function)
    assert tuple(inspect.signature(function).parameters) == operation.parameters_in(RELEASE)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.function)
def test_the_expressions_speak_of_parameters(operation: Operation) -> None:
    release = RELEASE if operation in HERE else operation.since
    known = {*operation.parameters_in(release), *sizes.__all__, "here"}
    for expression in (operation.size, operation.deferred):
        names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
        assert names <= known
    assert operation.root in (None, "src", "dst")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.function)
def test_a_function_that_another_release_has_is_not_in_this_one(operation: Operation) -> None:
    assert hasattr(dist.distributed_c10d, operation.function) or operation not in HERE
    if operation.gone is not None:
        assert not hasattr(dist.distributed_c10d, operation.function) or operation in HERE


class WithoutNbytes:
    """A tensor as it was before torch 2.1."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in ("nbytes", "itemsize"):
            raise AttributeError(name)
        return getattr(self._tensor, name)


HALVES, ROWS = torch.ones(5, dtype=torch.float16), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("all_reduce", {"tensor": HALVES}, 10),
        ("all_gather", {"tensor_list": [HALVES, ROWS]}, 10 + 48),
        ("all_gather_coalesced", {"output_tensor_lists": [[HALVES, ROWS], [HALVES]]}, 20 + 48),
        ("all_to_all", {"input_tensor_list": [HALVES, ROWS]}, 10),
        ("all_to_all_single", {"input": ROWS, "input_split_sizes": None}, 24),
        ("all_to_all_single", {"input": ROWS, "input_split_sizes": [1, 3]}, 12),
    ],
)
def test_messages_have_their_sizes_where_a_tensor_has_no_nbytes(
    function: str, arguments: dict[str, Any], expected: int
) -> None:
    def old(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return WithoutNbytes(value)
        return [old(one) for one in value] if isinstance(value, list) else value

    (row,) = [operation for operation in OPERATIONS if operation.function == function]
    names = {**vars(sizes), "here": Group("0", "world", "gloo", (0, 1), 1)}
    older = {name: old(value) for name, value in arguments.items()}
    assert eval(row.for_release((2, 0)).size, {**names, **older}) == expected
    assert eval(row.for_release(RELEASE).size, {**names, **arguments}) == expected


def test_a_sparse_tensor_has_no_size_on_any_release() -> None:
    sparse = torch.ones(3).to_sparse()
    for tensor in (sparse, WithoutNbytes(sparse)):
        with pytest.raises((AttributeError, RuntimeError)):
            sizes.nbytes(tensor)


def test_a_function_that_is_renamed_passes_on_to_one_of_the_table() -> None:
    for operation in OPERATIONS:
        if operation.renamed is not None:
            (successor,) = [one for one in OPERATIONS if one.name == operation.name and one is not operation]
            assert successor.since == operation.renamed
            assert successor.size == operation.size


def test_every_function_that_takes_a_group_is_in_the_table_or_moves_nothing() -> None:
    c10d = dist.distributed_c10d
    known = {operation.function for operation in OPERATIONS} | set(PASSED_ON) | NO_COLLECTIVES
    unknown = []
    for name, function in list(vars(c10d).items()):
        if not isinstance(function, types.FunctionType) or inspect.unwrap(function).__module__ != c10d.__name__:
            continue
        parameters = set(inspect.signature(function).parameters)
        public = not name.startswith("_") or name in ("_coalescing_manager", "_all_gather_base", "_reduce_scatter_base")
        if public and parameters & {"group", "p2p_op_list", "tensor", "input_tensor"} and name not in known:
            unknown.append(name)
    assert unknown == []


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {operation.name: operation.bus(8) for operation in OPERATIONS}
    assert factors["all_reduce"] == 2 * 7 / 8
    assert factors["all_gather"] == factors["reduce_scatter"] == factors["all_gather_into_tensor"] == 7 / 8
    assert factors["broadcast"] == factors["reduce"] == factors["all_to_all"] == factors["send"] == 1
    assert factors["barrier"] == 0
    assert all(operation.bus(1) >= 0 for operation in OPERATIONS)


def test_one_row_for_each_function() -> None:
    functions = [operation.function for operation in OPERATIONS]
    assert len(functions) == len(set(functions))
    assert {operation.kind for operation in OPERATIONS} == set(Kind)


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13)), ("2.9.0a0+50eac811a6.nv25.09", (2, 9)), ("2.10.0.dev1", (2, 10))]
)
def test_releases(version: str, release: tuple[int, int]) -> None:
    assert release_of(version) == release
