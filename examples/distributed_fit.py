"""A fit over ranks: torchrun --standalone --nproc-per-node=2 examples/distributed_fit.py"""

import torch
import torch.distributed as dist

from intention import distributed


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" with one GPU per rank
    rank, n, d = dist.get_rank(), 100_000, 64
    truth = torch.linspace(-1, 1, d).unsqueeze(-1)

    # every rank has points of its own, as many as it likes
    generator = torch.Generator().manual_seed(rank)
    key = torch.randn(n + 1000 * rank, d, generator=generator)
    value = key @ truth + 5 + 0.1 * torch.randn(len(key), 1, generator=generator)

    with torch.no_grad():
        context = distributed.fit(key, value, alpha=1e-3, intercept=True)  # the same on all ranks
    error = (context.w - truth).norm() / truth.norm()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, error of w {error:.1e}, intercept {context.intercept.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
