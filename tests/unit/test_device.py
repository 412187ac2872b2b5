from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.identity.device import Device, find, with_torch_properties

FAKE = Path(__file__).with_name("fake_nvml.py")
_spec = importlib.util.spec_from_file_location("fake_nvml", FAKE)
fake_nvml = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_nvml)
FakeNvml, GPUS, SLICES, GIB = fake_nvml.FakeNvml, fake_nvml.GPUS, fake_nvml.SLICES, fake_nvml.GIB


@pytest.mark.parametrize(
    ("local_rank", "visible", "uuid"),
    [
        (0, "5,3", GPUS[5]),
        (1, "5,3", GPUS[3]),
        (2, "5,3", None),
        (-1, "5,3", None),
        (None, "5,3", None),
        (3, "5", GPUS[5]),  # one GPU per process, whatever the local rank
        (None, "5", GPUS[5]),
        (0, "", None),
        (0, "-1", None),
        (0, "NoDevFiles", None),
        (0, "0,,1", GPUS[0]),
        (1, "0,,1", GPUS[0]),
        (0, "0,9,1", GPUS[0]),
        (0, "9", None),
        (0, "3,3", None),
        (0, "GPU-4932", GPUS[4]),
        (0, "GPU-", None),
        (0, "GPU-ffff", None),
        (1, f"{GPUS[2]},GPU-1932", GPUS[1]),
        (1, f"{GPUS[2]},1", GPUS[2]),
        (0, f"{GPUS[2]},GPU-2932", None),  # the same one twice
        (0, SLICES[1], SLICES[1]),
        (0, "MIG-a1b2", SLICES[0]),
        (0, "MIG-", None),
        (1, ",".join(SLICES), SLICES[0]),  # a process gets one slice, the first
        (0, f"MIG-{GPUS[6]}/2/0", SLICES[1]),
        (0, f"MIG-{GPUS[6]}/2/7", None),
        (0, f"MIG-{GPUS[3]}/1/0", None),
        (0, f"MIG-{GPUS[3][4:]}", GPUS[3]),
        (0, "6", SLICES[0]),
        (0, GPUS[6], SLICES[0]),
        (0, "7", None),  # in MIG mode, not cut
        (4, "0,1,2,3,4,5,7,6", GPUS[4]),
        (0, None, SLICES[0]),
        (5, None, SLICES[0]),
    ],
)
def test_the_gpu_of_a_rank_is_the_one_cuda_shows_it(local_rank, visible, uuid):
    nvml = FakeNvml()
    device = find(local_rank, visible, nvml)
    assert (device and device.uuid) == uuid
    assert nvml.sessions == 0


def test_without_a_list_or_slices_the_local_rank_counts_gpus():
    assert [find(rank, None, FakeNvml(mig=False)).uuid for rank in range(8)] == GPUS
    assert find(8, None, FakeNvml(mig=False)) is None


def test_ranks_that_all_believe_to_be_local_rank_0_get_the_gpu_they_were_given():
    found = [find(0, visible, FakeNvml(mig=False)).uuid for visible in ("0", "1")]
    assert found == GPUS[:2]


@pytest.mark.parametrize("answers_in_bytes", [True, False])
def test_everything_nvml_knows_is_there_and_named_as_the_builtin_names_it(answers_in_bytes):
    device = find(1, "5,3", FakeNvml(answers_in_bytes=answers_in_bytes))
    assert device.complaints == ()
    assert device.tags() == {
        "device.id": GPUS[3],
        "device.kind": "cuda",
        "device.index": 1,
        "device.gpu.name": "NVIDIA H100",
        "device.gpu.compute_capability": "9.0",
        "device.gpu.total_memory_bytes": 80 * GIB,
        "device.gpu.driver_version": "580.159.04",
    }


def test_a_slice_gives_its_own_facts_and_the_gpu_it_was_cut_from():
    device = find(0, SLICES[1], FakeNvml())
    assert device.tags() == {
        "device.id": SLICES[1],
        "device.kind": "cuda",
        "device.index": 0,
        "device.gpu.name": "NVIDIA H100 MIG 1g.10gb",
        "device.gpu.compute_capability": "9.0",
        "device.gpu.sm_count": 16,
        "device.gpu.total_memory_bytes": 10 * GIB,
        "device.gpu.driver_version": "580.159.04",
        "device.gpu.parent": GPUS[6],
    }


def test_a_list_cuda_does_not_read_to_its_end_is_complained_about():
    device = find(0, "0,,1", FakeNvml())
    assert device.complaints == ("CUDA_VISIBLE_DEVICES='0,,1': CUDA uses only the first 1 of the list",)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetName",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMemoryInfo",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetMigMode",
        "nvmlShutdown",
    ],
)
def test_one_question_without_an_answer_leaves_the_others(function):
    device = find(0, "3", FakeNvml(broken=(function,)))
    assert device.uuid == GPUS[3]
    assert len(device.tags()) >= 6


def test_bindings_older_than_mig_still_find_whole_gpus():
    class Old(FakeNvml):
        nvmlDeviceGetMigMode = property()
        nvmlDeviceGetAttributes = property()

    assert not hasattr(Old(), "nvmlDeviceGetMigMode")
    assert find(0, "6", Old()).uuid == GPUS[6]


def test_a_lost_gpu_does_not_renumber_the_others():
    nvml = FakeNvml(mig=False, broken=("gpu 2",))
    assert find(0, "3", nvml).uuid == GPUS[3]
    assert find(0, "2", nvml) is None


@pytest.mark.parametrize("broken", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_an_nvml_that_answers_nothing_is_no_device(broken):
    nvml = FakeNvml(broken=(broken,))
    assert find(0, None, nvml) is None
    assert nvml.sessions == 0


def test_no_driver_is_no_device():
    assert find(0, None, FakeNvml(driver=False)) is None


def test_a_driver_that_counts_without_end_is_not_asked_without_end():
    nvml = FakeNvml(gpus=10**9)
    find(0, "3", nvml)
    assert nvml.calls < 2000


@given(
    st.none() | st.integers(min_value=-2, max_value=9),
    st.lists(
        st.sampled_from(
            ["0", "6", "7", "8", "-1", "", " 3", "GPU-4932", "GPU-", GPUS[6], *SLICES, f"MIG-{GPUS[6]}/1/0"]
        )
        | st.text(max_size=6),
        max_size=5,
    ).map(",".join),
)
def test_no_list_makes_it_raise_or_leave_nvml_open(local_rank, visible):
    nvml = FakeNvml()
    device = find(local_rank, visible, nvml)
    assert nvml.sessions == 0
    assert device is None or device.uuid in GPUS + SLICES


def test_torch_adds_what_nvml_does_not_know():
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=84_000_000_000,
        uuid=GPUS[3][4:],
    )
    device = with_torch_properties(find(0, "3", FakeNvml()), properties)
    assert (device.uuid, device.sm_count, device.total_memory_bytes) == (GPUS[3], 132, 84_000_000_000)
    assert (device.name, device.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert device.driver_version == "580.159.04"
    assert device.complaints == ()


def test_where_torch_names_another_gpu_it_is_believed_and_said():
    device = with_torch_properties(find(0, None, FakeNvml(mig=False)), SimpleNamespace(uuid=GPUS[1][4:]))
    assert device.uuid == GPUS[1]
    assert device.complaints == (f"CUDA's device 0 is {GPUS[1]}, not {GPUS[0]} as in PCI order",)


def test_a_slice_stays_a_slice_whatever_uuid_torch_prints():
    device = with_torch_properties(find(0, SLICES[0], FakeNvml()), SimpleNamespace(uuid=GPUS[6][4:]))
    assert (device.uuid, device.parent_uuid) == (SLICES[0], GPUS[6])


def test_properties_of_an_older_torch_change_nothing_they_lack():
    device = find(0, "3", FakeNvml())
    assert with_torch_properties(device, SimpleNamespace()) == device


def test_a_device_without_a_uuid_is_named_by_its_kind_and_host():
    assert Device("cpu").tags() == {"device.id": "cpu", "device.kind": "cpu"}
    assert Device("cpu").tags("node-1")["device.id"] == "node-1:cpu"
    assert Device("xpu", 2).tags("node-1")["device.id"] == "node-1:xpu:2"


def _run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    places = [str(place) for place in path] + [str(Path(__file__).parents[2])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)


def test_looking_for_the_device_does_not_initialise_cuda():
    answer = _run(
        "import torch\n"
        "from ddtrace_pytorch.identity.device import find\n"
        "find(0, None)\n"
        "print(torch.cuda.is_initialized())"
    )
    assert (answer.stdout, answer.stderr) == ("False\n", "")


def test_the_deprecated_bindings_work_without_a_warning(tmp_path):
    (tmp_path / "fake_nvml.py").write_text(FAKE.read_text())
    (tmp_path / "pynvml.py").write_text(
        "import warnings, fake_nvml\n"
        "warnings.warn('The pynvml package is deprecated.', FutureWarning)\n"
        "nvml = fake_nvml.FakeNvml()\n"
        "NVMLError = nvml.NVMLError\n"
        "def __getattr__(name): return getattr(nvml, name)\n"
    )
    answer = _run(
        "import warnings; warnings.simplefilter('error')\n"
        "from ddtrace_pytorch.identity.device import find\n"
        "print(find(0, '5').uuid)",
        tmp_path,
    )
    assert (answer.stdout, answer.stderr) == (f"{GPUS[5]}\n", "")


def test_no_bindings_is_no_device_and_no_noise(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError(\"No module named 'pynvml'\", name='pynvml')\n")
    answer = _run("from ddtrace_pytorch.identity.device import find\nprint(find(0, None))", tmp_path)
    assert (answer.stdout, answer.stderr) == ("None\n", "")
