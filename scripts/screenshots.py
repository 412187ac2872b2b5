"""Makes the pictures of docs/images from a real run: four CPU ranks, of which rank 2 is slow and once stands still.

python scripts/screenshots.py        with what the tests need installed, and chromium
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness.chromium import browser  # noqa: E402
from harness.job import DDTRACE_RUN, PYTHON, environment, torchrun  # noqa: E402
from harness.viewer import PATIENCE, viewer  # noqa: E402
from harness.waiting import until  # noqa: E402

WIDTH, HEIGHT = 1280, 800
TRAIN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import ddtrace_pytorch

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]))
optimizer = torch.optim.AdamW(model.parameters())

class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 300 * 8

    def __getitem__(self, number):
        time.sleep(0.002 * (rank == 2) + 6 * (rank == 2 and number == 1200))
        return torch.randn(256)

for step, batch in enumerate(torch.utils.data.DataLoader(Digits(), batch_size=8)):
    optimizer.zero_grad()
    with ddtrace_pytorch.span("forward and backward"):
        loss = model(batch).square().mean()
        loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
    ddtrace_pytorch.scalar({"loss": loss})
    if step % 100 == 99:
        torch.save(model.state_dict(), f"model-{rank}.pt")
dist.destroy_process_group()
"""


def main() -> None:
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        env = environment(
            None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_LOG_DIR=str(folder / "log"), DD_PYTORCH_JOB_ID="llama-7b",
            DD_PYTORCH_STALL_SECONDS="2", DD_PYTORCH_COLLECTIVES="all", PYTHONPATH=str(ROOT), TMPDIR=made,
        )  # fmt: skip
        subprocess.run([*DDTRACE_RUN, *torchrun(4), "train.py"], env=env, cwd=folder, check=True)
        ours = [*PYTHON, "-m", "ddtrace_pytorch.cli.main"]
        page, line = folder / "report.html", folder / "timeline.json"
        for command in (
            ["report", "log", "--html", page],
            ["timeline", "log", "-o", line, "--steps", "100:105"],
        ):
            subprocess.run(
                [*ours, *map(str, command)], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder, check=True
            )
        with browser(folder / "browser") as opened:
            opened.open(page, dark=False, width=WIDTH, height=HEIGHT)
            opened.screenshot(images / "report.png", whole=False)
            opened.ask(
                "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
            )
            opened.ask(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
            )
            with viewer(opened, folder / "viewer") as shown:
                shown.open(line)
                (span,) = shown.ask("select min(ts) as start, max(ts + dur) as end from slice where name glob 'step *'")
                until(lambda: opened.run("app.trace.workspace.flatTracks.length > 0"), PATIENCE, "its tracks are there")
                opened.run("app.commands.runCommand('dev.perfetto.ToggleLeftSidebar')")
                opened.run("app.trace.workspace.flatTracks.forEach((track) => track.expand())")
                opened.run(f"app.trace.timeline.setViewportTime({span['start']}n, {span['end']}n)")
                opened.run("new Promise((done) => setTimeout(() => done(true), 3000))")
                opened.screenshot(images / "timeline.png", whole=False)


if __name__ == "__main__":
    main()
