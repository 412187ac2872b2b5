"""Train a small network on handwritten digits with DistributedDataParallel; plain torch, nothing of ours in it.

Needs scikit-learn, for its digits. Start it with

    DD_PATCH_MODULES=pytorch:true ddtrace-run torchrun --standalone --nproc-per-node 2 examples/digits_ddp.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels that scikit-learn ships: every fifth is kept for testing."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    held_back = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_back], labels[~held_back]), TensorDataset(images[held_back], labels[held_back])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(epochs: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, testing = digits()
    sampler: DistributedSampler = DistributedSampler(training, seed=0)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    test_images, test_labels = testing.tensors
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = nn.CrossEntropyLoss()

    if rank == 0:
        print(f"{len(training)} digits to learn from, {len(testing)} to be tested on, {world_size} ranks", flush=True)
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        with torch.no_grad():
            right = (model.module(test_images).argmax(dim=1) == test_labels).float().mean().item()
        if rank == 0:
            seconds = time.perf_counter() - started
            mean_loss = (total[0] / total[1]).item()
            print(f"epoch {epoch:2}/{epochs}  loss {mean_loss:.4f}  right {right:6.1%}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(epochs)
    dist.destroy_process_group()
