"""The same runs on an existing dask cluster. Needs the extra `intention[cluster]`.

distributed's own futures, not joblib's backend for them: that one waits for ever when dask gives a task up.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from intention.lab.core.files import LabError
from intention.lab.run.runner import Task

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["check", "run"]

T = TypeVar("T")
SECONDS = 5.0  # to find the scheduler, and then a worker


def run(
    tasks: Sequence[Task], address: str, work: Callable[[int, Task, None], T], take: Callable[[int, T | str], None]
) -> None:
    """`work(index, task, None)` on the cluster; `take(index, result)` here as each ends, with a text if it failed.

    A killed worker's run is begun again by dask on another one (from its checkpoint if the workers share the folder),
    and given up when that has happened a few times.
    """
    with _client(address) as client:
        from distributed import as_completed

        name = uuid.uuid4().hex
        futures = {
            client.submit(work, index, task, None, key=f"{task.id}-{name}", pure=False): index
            for index, task in enumerate(tasks)
        }
        try:
            for future in as_completed(futures, loop=client.loop):
                if future.cancelled() or future.status == "lost":
                    raise LabError(
                        f"the connection to the scheduler at {address} was lost; rows that had come back are saved. "
                        "Give the same command again: finished runs are not repeated"
                    )
                error = future.exception()
                take(futures[future], future.result() if error is None else f"{type(error).__name__}: {error}")
        except BaseException:
            client.cancel(list(futures))
            raise


def check(address: str) -> None:
    """Raise now what `run` would raise: no scheduler, no workers, workers that do not serve."""
    with _client(address):
        pass


@contextmanager
def _client(address: str) -> Iterator[Client]:
    try:
        from distributed import Client
    except ImportError as error:
        raise LabError("--cluster needs pip install 'intention[cluster]'") from error
    logging.getLogger("distributed").setLevel(logging.ERROR)  # what is lost is told by us
    try:
        client = Client(address, timeout=SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise LabError(
            f"no dask scheduler answers at {address} ({type(error).__name__}); an address looks like "
            "tcp://127.0.0.1:8786, and `dask scheduler` prints it"
        ) from error
    with client:
        _check_workers(client, address)
        yield client


def _check_workers(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=SECONDS)
    except TimeoutError as error:
        raise LabError(f"the cluster at {address} has no workers; `dask worker {address} --nthreads 1`") from error
    shared = [worker for worker, threads in client.nthreads().items() if threads > 1]
    if shared:
        raise LabError(
            f"workers of the cluster at {address} have more than one thread ({', '.join(shared)}), where only one run "
            "at a time can work; start them with --nthreads 1 and --nworkers for the number of cores"
        )
