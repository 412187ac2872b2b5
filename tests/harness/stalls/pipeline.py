"""A healthy pipeline: most ranks wait for a neighbour most of the time, while collectives of several groups overlap."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from harness.stalls.plan import Plan

MICROBATCHES = 4
LONGEST = 0.1


def train_pipeline(plan: Plan) -> None:
    """Stages in a line; gradients are reduced over all of them and over both halves while the next step begins."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1], group_desc="front"), dist.new_group([2, 3], group_desc="back")]
    half = halves[rank // 2]
    stage = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    chance = random.Random(rank)
    end = time.monotonic() + plan.seconds
    plan.struck()
    go_on = torch.ones(1)
    while go_on:
        _forward_and_backward(stage, rank, chance)
        flat = torch.cat([parameter.grad.flatten() for parameter in stage.parameters()])
        pending = [
            dist.all_reduce(flat.clone(), async_op=True),
            dist.all_reduce(flat.clone(), group=half, async_op=True),
            dist.all_reduce(flat[:16].clone(), async_op=True),
        ]
        time.sleep(chance.uniform(0, LONGEST))
        for one in pending:
            one.wait()
        optimizer.step()
        optimizer.zero_grad()
        go_on = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(go_on, 0)


def _forward_and_backward(stage: torch.nn.Module, rank: int, chance: random.Random) -> None:
    """All microbatches forward, then all backward; what is sent on is waited for at the end only."""
    first, last = rank == 0, rank == dist.get_world_size() - 1
    sent, kept = [], []
    for _ in range(MICROBATCHES):
        given = torch.rand(4, 16)
        if not first:
            dist.recv(given, rank - 1)
        given.requires_grad_()
        made = torch.tanh(stage(given))
        time.sleep(chance.uniform(0, LONGEST))
        if not last:
            sent.append(dist.isend(made.detach(), rank + 1))
        kept.append((given, made))
    for given, made in reversed(kept):
        gradient = torch.ones_like(made)
        if not last:
            (received,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, gradient, rank + 1)])
            received.wait()
        made.backward(gradient)
        if not first:
            sent.append(dist.isend(given.grad, rank - 1))
    for one in sent:
        one.wait()
