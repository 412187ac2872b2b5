"""Ray Train on two workers of a cluster that is there: the job says where."""

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train():
    import torch
    from ray.train.torch import prepare_model

    net = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(8):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


ray.init()
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
