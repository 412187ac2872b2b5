"""DeepSpeed's engine at each ZeRO stage and at none, with gradient accumulation over two batches."""

import deepspeed
import torch
from said import say

deepspeed.init_distributed("gloo")
for stage in (0, 1, 2, 3):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    for turn in range(16):
        torch.manual_seed(turn)
        loss = engine(torch.randn(2, 8)).square().mean()
        say(loss)
        engine.backward(loss)
        engine.step()
    engine.destroy()
torch.distributed.destroy_process_group()
