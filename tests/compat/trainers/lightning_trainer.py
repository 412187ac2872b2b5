"""A LightningModule on two CPU ranks, by the strategy that is named. torchrun starts them, Lightning does the rest."""

import os
import sys

import lightning as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from said import say
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

EPOCHS = 2
SHARDED_BY_MODULE = sys.argv[1] == "fsdp2"


class Fsdp(FSDPStrategy):
    """Lightning's own insists on a GPU, and names FSDP no device where there is none."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def configure_model(self):
        if SHARDED_BY_MODULE:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        say(loss)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


strategies = {
    "ddp": lambda: "ddp",
    "fsdp": Fsdp,
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
pl.seed_everything(0)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategies[sys.argv[1]](), max_epochs=EPOCHS, default_root_dir=os.getcwd(),
    logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    enable_checkpointing=sys.argv[1] != "fsdp",  # on a CPU, torch 2.13 dies of SIGSEGV in FSDP's state dict
)  # fmt: skip
trainer.fit(Model(), data)
