from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.identity.place import local_rank_hint, rank_hint, world_size_hint


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}, (3, "RANK")),
        ({"SLURM_PROCID": "1"}, (1, "SLURM_PROCID")),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, (2, "OMPI_COMM_WORLD_RANK")),
        ({"PMI_RANK": "2"}, (2, "PMI_RANK")),
        ({"PMIX_RANK": "2"}, (2, "PMIX_RANK")),
        ({"MV2_COMM_WORLD_RANK": "2"}, (2, "MV2_COMM_WORLD_RANK")),
        ({"JSM_NAMESPACE_RANK": "2"}, (2, "JSM_NAMESPACE_RANK")),
        ({"RANK": "1", "ELASTIC_JOB_NAME": "d"}, (None, None)),
        ({"RANK": "9", "LOCAL_RANK": "1", "ELASTIC_JOB_NAME": "d"}, (9, "RANK")),
        ({"RANK": "1", "PET_NNODES": "2"}, (None, None)),
        ({"RANK": "1", "PET_NNODES": "2", "OMPI_COMM_WORLD_RANK": "5"}, (5, "OMPI_COMM_WORLD_RANK")),
        ({"RANK": "x", "SLURM_PROCID": "4"}, (4, "SLURM_PROCID")),
        ({"RANK": "-1"}, (None, None)),
        ({"JOB_COMPLETION_INDEX": "1", "SKYPILOT_NODE_RANK": "1", "NODE_RANK": "1"}, (None, None)),
    ],
)
def test_the_rank_hint_takes_no_nodes_number_for_a_rank(environ, rank):
    assert rank_hint(environ) == rank


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, (8, "WORLD_SIZE")),
        ({"SLURM_NTASKS": "2"}, (2, "SLURM_NTASKS")),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (4, "OMPI_COMM_WORLD_SIZE")),
        ({"WORLD_SIZE": "2", "PET_NNODES": "2"}, (None, None)),
        ({"WORLD_SIZE": "0"}, (None, None)),
    ],
)
def test_the_world_size_hint_takes_no_number_of_nodes_for_it(environ, size):
    assert world_size_hint(environ) == size


@pytest.mark.parametrize(
    "variable",
    [
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "JSM_NAMESPACE_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ],
)
def test_every_launchers_local_rank_is_read(variable):
    assert local_rank_hint({variable: "1"}) == (1, variable)
    assert local_rank_hint({variable: "1", "LOCAL_RANK": "0"})[1] == "LOCAL_RANK"


@given(
    st.dictionaries(
        st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PET_NNODES", "ELASTIC_JOB_NAME"]),
        st.text(max_size=12) | st.integers(min_value=-2, max_value=10**12).map(str),
    )
)
def test_no_environment_makes_it_raise_or_name_a_variable_without_a_number(environ):
    for hint in (rank_hint, world_size_hint, local_rank_hint):
        number, variable = hint(environ)
        assert (number is None) == (variable is None)
        assert variable is None or int(environ[variable]) == number >= 0
