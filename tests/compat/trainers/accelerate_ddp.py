"""Accelerate with a scheduler and gradient accumulation over two batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from said import say

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2)
net, optimizer, data, scheduler = accelerator.prepare(net, optimizer, data, scheduler)
for batch in data:
    with accelerator.accumulate(net):
        loss = net(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    say(accelerator.gather(loss.detach()).mean())
accelerator.end_training()
