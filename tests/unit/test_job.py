from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.identity.job import LAUNCHERS, MOST_METADATA, identify
from ddtrace_pytorch.identity.values import LONGEST_VALUE, clean

VARIABLES = sorted(
    {name.variable for row in LAUNCHERS for name in row.ids}
    | {name.element for row in LAUNCHERS for name in row.ids if name.element}
    | {variable for row in LAUNCHERS for variable, _ in row.parts + row.facts}
    | {row.attempt.variable for row in LAUNCHERS if row.attempt}
    | {variable for row in LAUNCHERS for variable in row.signs}
    | {row.given[0] for row in LAUNCHERS if row.given}
    | {"DD_PYTORCH_JOB_ID", "_DD_RAY_RUN_METADATA"}
)


def test_an_empty_environment_says_nothing_and_invents_nothing():
    job = identify({})
    assert (job.id, job.source, job.launcher, job.attempt, job.attempt_source) == (None, None, None, None, None)
    assert (job.restart_count, job.ids, job.tags, job.complaints) == ("0", {}, {}, ())


@pytest.mark.parametrize(
    ("environ", "launcher", "job_id", "source", "tag"),
    [
        ({"TORCHELASTIC_RUN_ID": "r1"}, "torchrun", "r1", "TORCHELASTIC_RUN_ID", "torchelastic.run_id"),
        ({"SLURM_JOB_ID": "42"}, "slurm", "42", "SLURM_JOB_ID", "slurm.job_id"),
        ({"_RAY_SUBMISSION_ID": "raysubmit_1"}, "ray", "raysubmit_1", "_RAY_SUBMISSION_ID", "ray.submission_id"),
        ({"RAY_JOB_ID": "01000000"}, "ray", "01000000", "RAY_JOB_ID", "ray.job_id"),
        (
            {"KUBEFLOW_TRAINING_JOB_ID": "kf"},
            "kubeflow",
            "kf",
            "KUBEFLOW_TRAINING_JOB_ID",
            "kubeflow.training_job_id",
        ),
        ({"FLYTE_INTERNAL_EXECUTION_ID": "f1"}, "flyte", "f1", "FLYTE_INTERNAL_EXECUTION_ID", "flyte.execution_id"),
        (
            {"DET_TRIAL_ID": "7", "DET_EXPERIMENT_ID": "3"},
            "determined",
            "7",
            "DET_TRIAL_ID",
            "determined.trial_id",
        ),
        ({"DET_EXPERIMENT_ID": "3"}, "determined", "3", "DET_EXPERIMENT_ID", "determined.experiment_id"),
        ({"SKYPILOT_TASK_ID": "sky-1"}, "skypilot", "sky-1", "SKYPILOT_TASK_ID", "skypilot.task_id"),
        (
            {"RUN_NAME": "llm-1", "MOSAICML_PLATFORM": "true"},
            "mosaicml",
            "llm-1",
            "RUN_NAME",
            "mosaicml.run_name",
        ),
        (
            {"SM_TRAINING_ENV": json.dumps({"job_name": "sm-1"})},
            "sagemaker",
            "sm-1",
            "SM_TRAINING_ENV",
            "sagemaker.job_name",
        ),
        ({"AZUREML_RUN_ID": "az"}, "azureml", "az", "AZUREML_RUN_ID", "azureml.run_id"),
        ({"CLOUD_ML_JOB_ID": "v"}, "vertex", "v", "CLOUD_ML_JOB_ID", "vertex.job_id"),
        ({"RUNAI_JOB_NAME": "rj"}, "runai", "rj", "RUNAI_JOB_NAME", "runai.job_name"),
        ({"AWS_BATCH_JOB_ID": "u:3"}, "aws_batch", "u:3", "AWS_BATCH_JOB_ID", "aws_batch.job_id"),
        ({"NGC_RUN_ID": "n"}, "ngc", "n", "NGC_RUN_ID", "ngc.run_id"),
        ({"BEAKER_JOB_ID": "b"}, "beaker", "b", "BEAKER_JOB_ID", "beaker.job_id"),
        ({"LSB_JOBID": "9", "LSB_JOBINDEX": "0"}, "lsf", "9", "LSB_JOBID", "lsf.job_id"),
        ({"ELASTIC_JOB_NAME": "d", "JOB_UID": "u1"}, "dlrover", "u1", "JOB_UID", "dlrover.job_uid"),
        ({"ELASTIC_JOB_NAME": "d"}, "dlrover", "d", "ELASTIC_JOB_NAME", "dlrover.job_name"),
        ({"TORCHX_JOB_ID": "slurm://s/a"}, "torchx", "slurm://s/a", "TORCHX_JOB_ID", "torchx.job_id"),
    ],
)
def test_each_launcher_names_its_job(environ, launcher, job_id, source, tag):
    job = identify(environ)
    assert (job.launcher, job.id, job.source) == (launcher, job_id, source)
    assert job.ids[tag] == job_id
    assert job.complaints == ()


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"PET_NNODES": "2"}, "kubeflow"),
        ({"VC_TASK_INDEX": "0"}, "volcano"),
        ({"VK_TASK_INDEX": "1"}, "volcano"),
        ({"JOB_COMPLETION_INDEX": "0"}, "kubernetes"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpi"),
        ({"PMI_RANK": "0"}, "mpi"),
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        ({"WANDB_RUN_ID": "w"}, None),
        ({"RUN_NAME": "not MosaicML's"}, None),
        ({"RUN_NAME": "x", "MOSAICML_PLATFORM": "false"}, None),
        ({"JOB_UID": "not DLRover's"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
)
def test_a_launcher_without_an_id_is_still_recognised_and_a_stranger_is_not(environ, launcher):
    job = identify(environ)
    assert (job.launcher, job.id) == (launcher, None)


@pytest.mark.parametrize("word", ["none", "None", " NONE ", "null", "undefined", "Empty", "", "  ", "0", "\n0\n"])
def test_a_junk_word_is_no_id_whoever_says_it(word):
    for row in LAUNCHERS:
        for name in row.ids:
            if name.key is None and row.given is None:
                job = identify({name.variable: word})
                assert (job.id, job.ids) == (None, {}), name.variable
    assert identify({"DD_PYTORCH_JOB_ID": word, "SLURM_JOB_ID": "4242"}).id == "4242"


def test_torchruns_word_none_does_not_hide_the_slurm_job():
    job = identify({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4242"})
    assert (job.id, job.source, job.launcher) == ("4242", "SLURM_JOB_ID", "torchrun")


def test_explicit_wins_then_the_scheduler_then_torchrun_and_every_id_is_kept():
    environ = {
        "DD_PYTORCH_JOB_ID": " mine ",
        "_RAY_SUBMISSION_ID": "raysubmit_1",
        "SLURM_JOB_ID": "42",
        "RAY_JOB_ID": "01000000",
        "TORCHELASTIC_RUN_ID": "run",
        "WANDB_RUN_ID": "w",
        "WANDB_SWEEP_ID": "s",
    }
    everything = identify(environ).ids
    assert everything == {
        "ray.submission_id": "raysubmit_1",
        "slurm.job_id": "42",
        "ray.job_id": "01000000",
        "torchelastic.run_id": "run",
        "wandb.run_id": "w",
        "wandb.sweep_id": "s",
    }
    found = []
    for variable in ("DD_PYTORCH_JOB_ID", "_RAY_SUBMISSION_ID", "SLURM_JOB_ID", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID"):
        job = identify(environ)
        assert job.source == variable
        found.append(job.id)
        del environ[variable]
    assert found == ["mine", "raysubmit_1", "42", "01000000", "run"]
    assert identify(environ).id is None  # W&B's never names the job


def test_a_launcher_inside_another_is_the_one_that_started_this_process():
    nested = {"RAY_JOB_ID": "01", "SLURM_JOB_ID": "42", "KUBEFLOW_TRAINING_JOB_ID": "kf", "OMPI_COMM_WORLD_RANK": "0"}
    assert identify({**nested, "TORCHELASTIC_RESTART_COUNT": "0"}).launcher == "torchrun"
    for variable, launcher in zip(list(nested), ["ray", "slurm", "kubeflow", "mpi"], strict=True):
        assert identify(nested).launcher == launcher
        del nested[variable]


def test_a_slurm_array_task_keeps_all_its_ids_and_its_attempt():
    job = identify(
        {
            "SLURM_ARRAY_JOB_ID": "1234",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_JOB_ID": "1235",
            "SLURM_RESTART_COUNT": "1",
            "SLURM_STEP_ID": "3",
        }
    )
    assert (job.id, job.attempt, job.attempt_source) == ("1235", 1, "SLURM_RESTART_COUNT")
    assert job.ids == {
        "slurm.job_id": "1235",
        "slurm.array_job_id": "1234",
        "slurm.array_task_id": "2",
        "slurm.step_id": "3",
    }
    assert job.tags["slurm.restart_count"] == "1"


def test_the_first_step_and_the_first_task_of_an_array_are_numbered_0():
    job = identify({"SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0", "SLURM_STEP_ID": "0"})
    assert job.ids["slurm.array_task_id"] == job.ids["slurm.step_id"] == "0"


def test_elements_of_an_lsf_array_are_different_jobs():
    first, second = (identify({"LSB_JOBID": "9", "LSB_JOBINDEX": index}) for index in "12")
    assert (first.id, second.id) == ("9[1]", "9[2]")
    assert first.ids == {"lsf.job_id": "9", "lsf.job_index": "1"}


@pytest.mark.parametrize(
    ("environ", "attempt", "source"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0, "TORCHELASTIC_RESTART_COUNT"),
        ({"SLURM_RESTART_COUNT": "1"}, 1, "SLURM_RESTART_COUNT"),
        ({"AWS_BATCH_JOB_ATTEMPT": "1"}, 0, "AWS_BATCH_JOB_ATTEMPT"),
        ({"DET_TRIAL_RUN_ID": "3"}, 2, "DET_TRIAL_RUN_ID"),
        ({"FLYTE_ATTEMPT_NUMBER": "2"}, 2, "FLYTE_ATTEMPT_NUMBER"),
        ({"JOBSET_RESTART_ATTEMPT": "4"}, 4, "JOBSET_RESTART_ATTEMPT"),
        (
            {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
            1,
            "SLURM_RESTART_COUNT+TORCHELASTIC_RESTART_COUNT",
        ),
        (
            {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "2"},
            3,
            "SLURM_RESTART_COUNT+TORCHELASTIC_RESTART_COUNT",
        ),
        ({"FLYTE_ATTEMPT_NUMBER": "2", "JOBSET_RESTART_ATTEMPT": "7"}, 2, "FLYTE_ATTEMPT_NUMBER"),
        ({"JOB_COMPLETION_INDEX": "3"}, None, None),
        ({"SLURM_JOB_ID": "42"}, None, None),
        ({"TORCHX_JOB_ID": "t", "TORCHX_MAX_RETRIES": "3"}, None, None),
    ],
)
def test_attempts_count_from_0_and_unknown_stays_unknown(environ, attempt, source):
    job = identify(environ)
    assert (job.attempt, job.attempt_source) == (attempt, source)


@pytest.mark.parametrize("counter", ["x", "-1", "1.5", "９", "9" * 5000])
def test_a_counter_that_is_none_costs_one_complaint(counter):
    job = identify({"TORCHELASTIC_RESTART_COUNT": counter})
    assert (job.attempt, job.restart_count) == (None, "0")
    assert len(job.complaints) == 1
    assert job.complaints[0].startswith("TORCHELASTIC_RESTART_COUNT=")


def test_a_counter_below_its_first_value_is_not_counted():
    job = identify({"AWS_BATCH_JOB_ATTEMPT": "0"})
    assert job.attempt is None
    assert len(job.complaints) == 1


def test_restart_count_is_torchruns_alone():
    assert identify({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": " 2 "}).restart_count == "2"
    assert identify({"SLURM_RESTART_COUNT": "3"}).restart_count == "0"


def test_rays_facts_have_the_builtins_names():
    job = identify(
        {
            "_RAY_SUBMISSION_ID": "raysubmit_1",
            "_RAY_JOB_NAME": "mnist",
            "_DD_RAY_RUN_METADATA": json.dumps({"team": "vision", "n": 1, "odd key\n": "x", "": "y", "empty": ""}),
        }
    )
    assert job.tags == {
        "ray.submission_id": "raysubmit_1",
        "ray.train.run_name": "mnist",
        "ray.metadata.team": "vision",
        "ray.metadata.n": "1",
        "ray.metadata.odd_key_": "x",
    }
    assert job.complaints == ()


@pytest.mark.parametrize("variable", ["_DD_RAY_RUN_METADATA", "SM_TRAINING_ENV"])
@pytest.mark.parametrize("text", ["{", "[1]", "3", "nonsense", "[" * 100_000, '{"a":' * 50_000, "1" * 5000])
def test_malformed_json_costs_one_complaint_and_no_tag(variable, text):
    job = identify({variable: text})
    assert (job.id, job.ids, job.tags) == (None, {}, {})
    assert job.complaints == (f"{variable} is not a JSON object; ignored",)


def test_metadata_without_end_becomes_a_bounded_number_of_tags():
    job = identify({"_DD_RAY_RUN_METADATA": json.dumps({f"k{number}": number for number in range(1000)})})
    assert len(job.tags) == MOST_METADATA
    assert len(job.complaints) == 1


def test_a_megabyte_of_oddities_becomes_one_short_line():
    job = identify({"SLURM_JOB_ID": "a\nb\x00c\x1b[31m\u2028d\udcff é" + "z" * 1_000_000})
    assert job.id is not None
    assert job.id.startswith("a b c [31m d é")
    assert len(job.id) == LONGEST_VALUE


ODD_TEXT = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", " ", "0", "none", "1", "7", "-1", "true", "{}", '{"job_name": {"a": null}}', '{"\\ud800": "\\n"}']
    ),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=4).map(json.dumps),
    st.integers(min_value=300, max_value=3000).map(lambda count: "x\n" * count),
)


# A shared machine is slow by fits; what is generated is small.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(VARIABLES), ODD_TEXT, max_size=12))
def test_no_environment_makes_it_raise_or_leak_anything_but_short_clean_lines(environ):
    job = identify(environ)
    texts = [job.restart_count, *job.ids.values(), *job.tags.values()]
    texts += [text for text in (job.id, job.source, job.launcher, job.attempt_source) if text is not None]
    for text in texts:
        assert text
        assert text.isprintable()
        assert len(text) <= LONGEST_VALUE
        assert text == clean(text)
    assert all(tag.isprintable() for tag in (*job.ids, *job.tags))
    assert all(line.isprintable() for line in job.complaints)
    assert job.restart_count.isdigit()
    assert (job.id is None) == (job.source is None)
    assert job.attempt is None or job.attempt >= 0
    assert identify(environ) == job


def test_importing_the_modules_brings_in_neither_torch_nor_ddtrace_nor_nvml():
    code = (
        "import sys\n"
        "from ddtrace_pytorch.identity import device, job, place, runtime, visible_devices\n"
        "print([name for name in ('torch', 'ddtrace', 'pynvml', 'wrapt') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
