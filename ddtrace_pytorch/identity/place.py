"""Which rank of how many this process probably is, by what its launcher left in the environment.

For a rendezvous that failed, and for the device before one is chosen: after a rendezvous torch knows better, always.
Each hint comes with the variable that gave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtrace_pytorch.identity.values import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Hint = tuple[int | None, str | None]


def rank_hint(environ: Mapping[str, str]) -> Hint:
    """The rank this process probably has.

    ``RANK`` is passed over where it is known to number nodes. Variables of MPI come before SLURM's: what mpirun starts
    inside an allocation inherits the batch step's ``SLURM_PROCID``, 0 everywhere.
    """
    return _first_number(
        environ,
        (
            *(() if _rank_is_a_nodes(environ) else ("RANK",)),
            "OMPI_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_RANK",
            "JSM_NAMESPACE_RANK",
            "PMIX_RANK",
            "PMI_RANK",
            "SLURM_PROCID",
        ),
        least=0,
    )


def world_size_hint(environ: Mapping[str, str]) -> Hint:
    """The number of ranks there probably are; see :func:`rank_hint`."""
    return _first_number(
        environ,
        (
            *(() if _rank_is_a_nodes(environ) else ("WORLD_SIZE",)),
            "OMPI_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_SIZE",
            "JSM_NAMESPACE_SIZE",
            "PMI_SIZE",
            "SLURM_NTASKS",
        ),
        least=1,
    )


def local_rank_hint(environ: Mapping[str, str]) -> Hint:
    """This process' number on its host."""
    return _first_number(
        environ,
        (
            "LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "SLURM_LOCALID",
        ),
        least=0,
    )


def local_world_size_hint(environ: Mapping[str, str]) -> Hint:
    """The number of ranks that its launcher started on this host."""
    return _first_number(
        environ,
        ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
        least=1,
    )


def _first_number(environ: Mapping[str, str], variables: Iterable[str], least: int) -> Hint:
    for variable in variables:
        number = whole_number(environ.get(variable, ""))
        if number is not None and number >= least:
            return number, variable
    return None, None


def _rank_is_a_nodes(environ: Mapping[str, str]) -> bool:
    """Under DLRover and Kubeflow ``RANK`` numbers nodes until an agent on the node, which sets ``LOCAL_RANK``,
    gives each worker its own."""
    node_ranks = any(variable == "ELASTIC_JOB_NAME" or variable.startswith("PET_") for variable in environ)
    return node_ranks and not environ.get("LOCAL_RANK", "").strip()
