"""A LightningModule on two CPU ranks: torchrun starts the ranks, Lightning does the rest."""

import os

import lightning as pl
import torch
from said import say

EPOCHS = 2


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        say(loss)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


pl.seed_everything(0)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, default_root_dir=os.getcwd(), logger=False,
    enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
)  # fmt: skip
trainer.fit(Model(), data)
