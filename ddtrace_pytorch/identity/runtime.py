"""What a rank runs on: torch's build and switches, and what the environment tells NCCL.

Nothing here initialises CUDA. Tag names are those of ddtrace's built-in integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddtrace_pytorch.identity.values import clean, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Tag, and how to get it from the torch module. A getter that fails or gives None leaves its fact out: builds differ
# in what they have.
TORCH_FACTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("torch.version", lambda torch: torch.__version__),
    ("torch.cuda.version", lambda torch: torch.version.cuda),
    ("torch.cuda.hip_version", lambda torch: torch.version.hip),
    ("torch.cuda.nccl_version", lambda torch: torch.cuda.nccl.version()),
    ("torch.cudnn.enabled", lambda torch: torch.backends.cudnn.enabled),
    ("torch.cudnn.benchmark", lambda torch: torch.backends.cudnn.benchmark),
    ("torch.cudnn.deterministic", lambda torch: torch.backends.cudnn.deterministic),
    ("torch.float32_matmul_precision", lambda torch: torch.get_float32_matmul_precision()),
    ("torch.mps.available", lambda torch: torch.backends.mps.is_available()),
)

# Tag, the variables it may come from (the first one set wins), and whether it is a number.
ENVIRONMENT_FACTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("nccl.debug", ("NCCL_DEBUG",), False),
    ("nccl.socket_ifname", ("NCCL_SOCKET_IFNAME",), False),
    ("nccl.ib_disable", ("NCCL_IB_DISABLE",), False),
    ("nccl.p2p_disable", ("NCCL_P2P_DISABLE",), False),
    ("nccl.algo", ("NCCL_ALGO",), False),
    ("nccl.proto", ("NCCL_PROTO",), False),
    ("nccl.async_error_handling", ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), False),
    ("device.cuda.visible_devices", ("CUDA_VISIBLE_DEVICES",), False),
    ("pytorch.master_addr", ("MASTER_ADDR",), False),
    ("pytorch.master_port", ("MASTER_PORT",), True),
    ("pytorch.local_rank", ("LOCAL_RANK",), True),
    ("pytorch.local_world_size", ("LOCAL_WORLD_SIZE",), True),
    ("pytorch.group_rank", ("GROUP_RANK",), True),
    ("pytorch.group_world_size", ("GROUP_WORLD_SIZE",), True),
    ("debug.level", ("TORCH_DISTRIBUTED_DEBUG",), False),
)


def torch_facts(torch: Any) -> dict[str, str]:
    """Facts about the imported `torch` module that cost next to nothing; booleans are ``true`` and ``false``."""
    facts = {tag: _ask(get, torch) for tag, get in TORCH_FACTS}
    return {tag: text for tag, text in facts.items() if text}


def cudnn_version(torch: Any) -> dict[str, str]:
    """``torch.cudnn.version``, or nothing without cuDNN. May load the library: not for the training thread."""
    # Not torch.backends.cudnn.version(): it compares the devices' capabilities, which initialises CUDA.
    text = _ask(lambda torch: torch._C._cudnn.getVersionInt(), torch)
    return {"torch.cudnn.version": text} if text else {}


def environment_facts(environ: Mapping[str, str]) -> dict[str, str | int]:
    """What `environ` says about NCCL, visible devices and the rendezvous.

    Ranks, sizes and the port are numbers, as they are in the built-in integration; one that isn't a number is left
    out. An empty ``CUDA_VISIBLE_DEVICES`` is kept: it hides every GPU.
    """
    facts: dict[str, str | int] = {}
    for tag, variables, is_number in ENVIRONMENT_FACTS:
        text = next((clean(environ[variable]) for variable in variables if environ.get(variable, "").strip()), "")
        value = whole_number(text) if is_number else text or None
        if value is not None:
            facts[tag] = value
    if "CUDA_VISIBLE_DEVICES" in environ:
        facts.setdefault("device.cuda.visible_devices", "")
    return facts


def _ask(get: Callable[[Any], Any], torch: Any) -> str | None:
    try:
        value = get(torch)
    except Exception:  # whatever a vendor's build raises for what it lacks
        return None
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    return clean(str(value))
