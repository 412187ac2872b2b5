"""Which job this process belongs to, read from what its launcher left in the environment.

One table, :data:`LAUNCHERS`: supporting another launcher is adding a row. Pure: same variables in, same
:class:`Job` out; nothing is imported, asked or remembered.

*Job id.* ``DD_PYTORCH_JOB_ID`` first, then the first id in table order: the scheduler that owns the job comes
before the tools it runs, torchrun last. Every other id found is kept in :attr:`Job.ids` all the same, so that a
dashboard built on one of them still finds the run.

*Launcher.* ``torchrun`` when its agent started this process (it left ``TORCHELASTIC_*``), otherwise the first row
in table order that left a sign of itself: torchrun inside SLURM is ``torchrun``, with the id of the SLURM job.

*Attempt.* Counted from 0 whatever the launcher counts from (``AWS_BATCH_JOB_ATTEMPT=1`` is attempt 0), and None
where nobody says: a missing counter is not a first attempt. The scheduler's counter and torchrun's are added up.
torchrun starts again at 0 when the scheduler requeues the job, and the scheduler's stands still while torchrun
restarts workers, so only the sum rises at both kinds of restart. It is the number of restarts known to have
happened: restarts torchrun made before a requeue are forgotten. Each counter is also a tag of its own.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from ddtrace_pytorch.identity.values import LONGEST_VALUE, clean, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_METADATA = 32

_NO_ID = frozenset(("", "0", "none", "null", "undefined", "empty"))


class Id(NamedTuple):
    """A variable that may name the job, and the span tag that keeps it.

    With `key` the variable holds a JSON object and the id is what it has there. With `element` that variable tells
    the elements of a job array apart where the id itself is the same for all of them.
    """

    variable: str
    tag: str
    key: str | None = None
    element: str | None = None


class Counter(NamedTuple):
    """A variable that counts attempts from `first`, and the span tag that keeps it as it is."""

    variable: str
    tag: str
    first: int = 0


class Launcher(NamedTuple):
    """One row.

    `word` is the value of the ``launcher`` tag; a row without one (W&B) launches nothing and never names the job.
    `ids` may name the job, the first one found wins. `parts` are narrower ids, for which 0 is a value. `facts` are
    kept as tags when the row's launcher is there. Any of `ids`, `attempt` or `signs` being set, even to a word that
    is no id, shows that it is. With `given` the row counts only while that variable has that value (None: any).
    """

    word: str | None
    ids: tuple[Id, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    attempt: Counter | None = None
    facts: tuple[tuple[str, str], ...] = ()
    signs: tuple[str, ...] = ()
    given: tuple[str, str | None] | None = None


TORCHRUN = Launcher(
    "torchrun",
    ids=(Id("TORCHELASTIC_RUN_ID", "torchelastic.run_id"),),
    attempt=Counter("TORCHELASTIC_RESTART_COUNT", "torchelastic.restart_count"),
    facts=(
        ("TORCHELASTIC_MAX_RESTARTS", "torchelastic.max_restarts"),
        ("ROLE_NAME", "torchelastic.role_name"),
        ("ROLE_RANK", "torchelastic.role_rank"),
    ),
    signs=("TORCHELASTIC_MAX_RESTARTS",),
)

# Not here, because they leave nothing of their own: PyTorchJob v1 (plain RANK and WORLD_SIZE), DeepSpeed's and
# Lightning's launchers.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "ray",
        ids=(Id("_RAY_SUBMISSION_ID", "ray.submission_id"),),
        facts=(("_RAY_JOB_NAME", "ray.train.run_name"),),
        signs=("RAY_JOB_ID", "_RAY_JOB_NAME", "_DD_RAY_RUN_METADATA"),
    ),
    Launcher(
        "slurm",
        # Each task of an array has a SLURM_JOB_ID of its own.
        ids=(Id("SLURM_JOB_ID", "slurm.job_id"),),
        parts=(
            ("SLURM_ARRAY_JOB_ID", "slurm.array_job_id"),
            ("SLURM_ARRAY_TASK_ID", "slurm.array_task_id"),
            ("SLURM_STEP_ID", "slurm.step_id"),
        ),
        attempt=Counter("SLURM_RESTART_COUNT", "slurm.restart_count"),
    ),
    Launcher(
        "kubeflow",
        ids=(Id("KUBEFLOW_TRAINING_JOB_ID", "kubeflow.training_job_id"),),
        facts=(
            ("PET_NNODES", "kubeflow.nnodes"),
            ("PET_NPROC_PER_NODE", "kubeflow.nproc_per_node"),
            ("PET_NODE_RANK", "kubeflow.node_rank"),
        ),
        signs=("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ),
    Launcher(
        "flyte",
        ids=(Id("FLYTE_INTERNAL_EXECUTION_ID", "flyte.execution_id"),),
        attempt=Counter("FLYTE_ATTEMPT_NUMBER", "flyte.attempt_number"),
        facts=(("FLYTE_INTERNAL_TASK_NAME", "flyte.task_name"),),
    ),
    Launcher(
        "determined",
        # The trial is the training run; an experiment may hold many, an allocation is one attempt of one.
        ids=(
            Id("DET_TRIAL_ID", "determined.trial_id"),
            Id("DET_EXPERIMENT_ID", "determined.experiment_id"),
            Id("DET_TASK_ID", "determined.task_id"),
        ),
        parts=(("DET_ALLOCATION_ID", "determined.allocation_id"),),
        # Raised before the containers of a run start.
        attempt=Counter("DET_TRIAL_RUN_ID", "determined.trial_run_id", first=1),
    ),
    Launcher(
        "skypilot",
        ids=(Id("SKYPILOT_TASK_ID", "skypilot.task_id"),),
        facts=(
            ("SKYPILOT_NODE_RANK", "skypilot.node_rank"),
            ("SKYPILOT_NUM_NODES", "skypilot.num_nodes"),
            ("SKYPILOT_NODE_IPS", "skypilot.node_ips"),
            ("SKYPILOT_NUM_GPUS_PER_NODE", "skypilot.num_gpus_per_node"),
        ),
    ),
    Launcher(
        "mosaicml",
        ids=(Id("RUN_NAME", "mosaicml.run_name"),),
        facts=(("NODE_RANK", "mosaicml.node_rank"),),
        given=("MOSAICML_PLATFORM", "true"),
        signs=("MOSAICML_PLATFORM",),
    ),
    Launcher(
        "sagemaker",
        ids=(Id("SM_TRAINING_ENV", "sagemaker.job_name", key="job_name"),),
        facts=(("SM_CURRENT_HOST", "sagemaker.current_host"), ("SM_HOSTS", "sagemaker.hosts")),
    ),
    Launcher(
        "azureml",
        ids=(Id("AZUREML_RUN_ID", "azureml.run_id"),),
        facts=(("AZUREML_EXPERIMENT_ID", "azureml.experiment_id"),),
    ),
    Launcher("vertex", ids=(Id("CLOUD_ML_JOB_ID", "vertex.job_id"),)),
    Launcher("runai", ids=(Id("RUNAI_JOB_NAME", "runai.job_name"),), facts=(("RUNAI_PROJECT", "runai.project"),)),
    Launcher(
        "aws_batch",
        # The id of an array's child already ends in its index.
        ids=(Id("AWS_BATCH_JOB_ID", "aws_batch.job_id"),),
        parts=(("AWS_BATCH_JOB_ARRAY_INDEX", "aws_batch.job_array_index"),),
        attempt=Counter("AWS_BATCH_JOB_ATTEMPT", "aws_batch.job_attempt", first=1),
    ),
    Launcher("ngc", ids=(Id("NGC_JOB_ID", "ngc.job_id"), Id("NGC_RUN_ID", "ngc.run_id"))),
    Launcher(
        "beaker",
        ids=(Id("BEAKER_JOB_ID", "beaker.job_id"),),
        facts=(
            ("BEAKER_REPLICA_RANK", "beaker.replica_rank"),
            ("BEAKER_REPLICA_COUNT", "beaker.replica_count"),
        ),
    ),
    Launcher(
        "lsf",
        ids=(Id("LSB_JOBID", "lsf.job_id", element="LSB_JOBINDEX"),),
        parts=(("LSB_JOBINDEX", "lsf.job_index"),),
    ),
    Launcher(
        "dlrover",
        # The name comes back with every run of the job, the uid doesn't.
        ids=(Id("JOB_UID", "dlrover.job_uid"), Id("ELASTIC_JOB_NAME", "dlrover.job_name")),
        given=("ELASTIC_JOB_NAME", None),
    ),
    Launcher(
        "volcano",
        parts=(("VC_TASK_INDEX", "volcano.task_index"), ("VK_TASK_INDEX", "volcano.task_index")),
        signs=("VC_TASK_INDEX", "VK_TASK_INDEX"),
    ),
    Launcher(
        "kubernetes",
        parts=(("JOB_COMPLETION_INDEX", "kubernetes.job_completion_index"),),
        attempt=Counter("JOBSET_RESTART_ATTEMPT", "kubernetes.jobset_restart_attempt"),
        signs=("JOB_COMPLETION_INDEX",),
    ),
    Launcher(
        "torchx",
        ids=(Id("TORCHX_JOB_ID", "torchx.job_id"),),
        facts=(("TORCHX_MAX_RETRIES", "torchx.max_retries"),),
        signs=("TORCHX_MAX_RETRIES",),
    ),
    # Unique within one Ray cluster only, so it names the job when nothing better does.
    Launcher("ray", ids=(Id("RAY_JOB_ID", "ray.job_id"),)),
    TORCHRUN,
    Launcher(
        "accelerate",
        facts=(
            ("ACCELERATE_USE_FSDP", "accelerate.use_fsdp"),
            ("ACCELERATE_USE_DEEPSPEED", "accelerate.use_deepspeed"),
            ("ACCELERATE_USE_MEGATRON_LM", "accelerate.use_megatron_lm"),
        ),
        signs=("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    ),
    Launcher(
        "mpi",
        signs=("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALRANKID"),
    ),
    # Resumed runs share their id by design, so it never names the job.
    Launcher(None, ids=(Id("WANDB_RUN_ID", "wandb.run_id"), Id("WANDB_SWEEP_ID", "wandb.sweep_id"))),
)


class Job(NamedTuple):
    """What the environment says about the job.

    `id` and the `source` variable it came from are None together, and so are `attempt` (from 0) and
    `attempt_source` (``A+B`` where two counters were added). `restart_count` is digits, fit for a store key and the
    same on every rank of one torchrun round. `ids` and `tags` go from span tag to value. Every text is one line of
    printable characters, at most :data:`LONGEST_VALUE` long. `complaints` are for the log, one line each.
    """

    id: str | None
    source: str | None
    launcher: str | None
    attempt: int | None
    attempt_source: str | None
    restart_count: str
    ids: dict[str, str]
    tags: dict[str, str]
    complaints: tuple[str, ...]


def identify(environ: Mapping[str, str]) -> Job:
    """Read :data:`LAUNCHERS` against `environ`. Never raises; what cannot be read is left out with a complaint."""
    complaints: list[str] = []
    ids: dict[str, str] = {}
    tags: dict[str, str] = {}
    job_ids: list[tuple[str, str]] = []
    counts: list[tuple[int, str]] = []
    present: list[Launcher] = []
    restarts: int | None = None

    explicit = _id_text(environ.get("DD_PYTORCH_JOB_ID", ""))
    if explicit:
        job_ids.append((explicit, "DD_PYTORCH_JOB_ID"))
    for row in LAUNCHERS:
        if not _is_present(row, environ):
            continue
        present.append(row)
        for name in row.ids:
            value = _read_id(name, environ, complaints)
            if value:
                ids[name.tag] = value
                if row.word:
                    job_ids.append((_with_index(value, name, environ), name.variable))
        _keep(row.parts, environ, ids)
        _keep(row.facts, environ, tags)
        if row.attempt:
            count = _read_count(row.attempt, environ, complaints)
            _keep(((row.attempt.variable, row.attempt.tag),), environ, tags)
            if row is TORCHRUN:
                restarts = count
            elif count is not None:
                counts.append((count, row.attempt.variable))
    tags.update(_ray_metadata(environ, complaints))
    if "ray.submission_id" in ids:
        tags["ray.submission_id"] = ids["ray.submission_id"]

    counts = counts[:1]
    if restarts is not None:
        counts.append((restarts, "TORCHELASTIC_RESTART_COUNT"))
    job_id, source = job_ids[0] if job_ids else (None, None)
    return Job(
        id=job_id,
        source=source,
        launcher=_launcher(present),
        attempt=sum(count for count, _ in counts) if counts else None,
        attempt_source="+".join(variable for _, variable in counts) or None,
        restart_count=str(restarts or 0),
        ids=ids,
        tags=tags,
        complaints=tuple(complaints),
    )


def _launcher(present: list[Launcher]) -> str | None:
    if TORCHRUN in present:
        return TORCHRUN.word
    return next((row.word for row in present if row.word), None)


def _is_present(row: Launcher, environ: Mapping[str, str]) -> bool:
    if row.given:
        variable, wanted = row.given
        value = clean(environ.get(variable, ""))
        if not value or (wanted is not None and value.lower() != wanted):
            return False
    variables = [name.variable for name in row.ids] + list(row.signs)
    if row.attempt:
        variables.append(row.attempt.variable)
    return any(environ.get(variable, "").strip() for variable in variables)


def _id_text(raw: str) -> str | None:
    text = clean(raw)
    return None if text.lower() in _NO_ID else text


def _read_id(name: Id, environ: Mapping[str, str], complaints: list[str]) -> str | None:
    raw = environ.get(name.variable, "")
    if name.key is None or not raw.strip():
        return _id_text(raw)
    return _id_text(_json_object(name.variable, raw, complaints).get(name.key, ""))


def _with_index(value: str, name: Id, environ: Mapping[str, str]) -> str:
    index = _id_text(environ.get(name.element, "")) if name.element else None
    return clean(f"{value}[{index}]") if index else value


def _keep(pairs: Iterable[tuple[str, str]], environ: Mapping[str, str], into: dict[str, str]) -> None:
    for variable, tag in pairs:
        value = clean(environ.get(variable, ""))
        if value:
            into.setdefault(tag, value)


def _read_count(counter: Counter, environ: Mapping[str, str], complaints: list[str]) -> int | None:
    raw = environ.get(counter.variable, "").strip()
    if not raw:
        return None
    number = whole_number(raw)
    if number is None or number < counter.first:
        shown = clean(raw)[:40]
        complaints.append(f"{counter.variable}={shown!r} is not a whole number from {counter.first}; not counted")
        return None
    return number - counter.first


def _json_object(variable: str, raw: str, complaints: list[str]) -> dict[str, str]:
    """The object's values as text; a complaint and nothing where `raw` isn't one."""
    try:
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError
        return {key: str(item) for key, item in value.items()}
    except (ValueError, RecursionError):
        complaints.append(f"{variable} is not a JSON object; ignored")
        return {}


def _ray_metadata(environ: Mapping[str, str], complaints: list[str]) -> dict[str, str]:
    raw = environ.get("_DD_RAY_RUN_METADATA", "")
    if not raw.strip():
        return {}
    metadata = _json_object("_DD_RAY_RUN_METADATA", raw, complaints)
    if len(metadata) > MOST_METADATA:
        complaints.append(f"_DD_RAY_RUN_METADATA has {len(metadata)} entries; the first {MOST_METADATA} are tags")
    tags = {}
    for key, item in list(metadata.items())[:MOST_METADATA]:
        name = re.sub(r"[^A-Za-z0-9_.\-/]+", "_", key[:LONGEST_VALUE])
        value = clean(item)
        if name and value:
            tags[f"ray.metadata.{name}"] = value
    return tags
