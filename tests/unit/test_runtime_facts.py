from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ddtrace_pytorch.identity.runtime import cudnn_version, environment_facts, torch_facts


def test_facts_of_the_torch_that_runs_have_the_builtins_names_and_spelling():
    facts = torch_facts(torch)
    assert facts["torch.version"] == torch.__version__
    assert facts["torch.float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert facts["torch.cudnn.benchmark"] == "false"
    assert facts["torch.cudnn.deterministic"] == "false"
    assert facts["torch.cudnn.enabled"] == "true"
    assert facts["torch.mps.available"] in ("true", "false")
    assert facts.get("torch.cuda.version") == torch.version.cuda
    assert all(type(value) is str for value in facts.values())


def _initialises_cuda() -> None:
    raise AssertionError("torch.backends.cudnn.version() initialises CUDA on a host with GPUs (seen with 2.11)")


def test_a_cuda_build_tells_its_versions():
    build = SimpleNamespace(
        __version__="2.9.0a0+nv25.10",
        version=SimpleNamespace(cuda="13.0", hip=None),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 7))),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=_initialises_cuda, enabled=True)),
        _C=SimpleNamespace(_cudnn=SimpleNamespace(getVersionInt=lambda: 91400)),
    )
    assert torch_facts(build) == {
        "torch.version": "2.9.0a0+nv25.10",
        "torch.cuda.version": "13.0",
        "torch.cuda.nccl_version": "2.27.7",
        "torch.cudnn.enabled": "true",
    }
    assert cudnn_version(build) == {"torch.cudnn.version": "91400"}


def test_a_build_that_lacks_everything_has_no_facts():
    assert torch_facts(SimpleNamespace()) == {}
    assert cudnn_version(SimpleNamespace()) == {}


def test_a_switch_whose_getter_raises_is_left_out():
    def mixed_settings() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    facts = torch_facts(SimpleNamespace(__version__="2.9", get_float32_matmul_precision=mixed_settings))
    assert facts == {"torch.version": "2.9"}


def test_asking_does_not_initialise_cuda():
    code = (
        "import torch\n"
        "from ddtrace_pytorch.identity.runtime import cudnn_version, torch_facts\n"
        "torch_facts(torch), cudnn_version(torch)\n"
        "print(torch.cuda.is_initialized())"
    )
    answer = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


def test_the_environments_facts_have_the_builtins_names_and_types():
    environ = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "LL128",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    assert environment_facts(environ) == {
        "nccl.debug": "INFO",
        "nccl.socket_ifname": "eth0",
        "nccl.ib_disable": "1",
        "nccl.p2p_disable": "0",
        "nccl.algo": "Ring",
        "nccl.proto": "LL128",
        "nccl.async_error_handling": "1",
        "device.cuda.visible_devices": "0,1",
        "pytorch.master_addr": "10.0.0.1",
        "pytorch.master_port": 29500,
        "pytorch.local_rank": 0,
        "pytorch.local_world_size": 8,
        "pytorch.group_rank": 1,
        "pytorch.group_world_size": 2,
        "debug.level": "DETAIL",
    }


def test_todays_name_of_a_variable_wins_over_yesterdays():
    environ = {"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert environment_facts(environ) == {"nccl.async_error_handling": "3"}


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_list_of_devices_is_a_fact_and_any_other_empty_variable_is_none(text):
    environ = {"CUDA_VISIBLE_DEVICES": text, "NCCL_DEBUG": text, "LOCAL_RANK": text}
    assert environment_facts(environ) == {"device.cuda.visible_devices": ""}
    assert environment_facts({}) == {}


def test_odd_values_are_cleaned_and_no_number_is_left_out():
    environ = {"NCCL_SOCKET_IFNAME": "eth0\neth1\x00" + "x" * 1_000_000, "LOCAL_RANK": "one", "MASTER_PORT": "9" * 5000}
    facts = environment_facts(environ)
    assert list(facts) == ["nccl.socket_ifname"]
    assert facts["nccl.socket_ifname"].startswith("eth0 eth1 x")
    assert len(facts["nccl.socket_ifname"]) == 200
