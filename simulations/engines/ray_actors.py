"""Dead Ray actors are replaced, and what they were doing is done again.

Flower 1.41 puts an actor that died back into its pool, first in line: it fails every message it is handed at once, and
is handed the next one because it is free. A run with one dead worker of two so loses every message from then on, with
nothing but error replies to show for it. Here the pool notices the death, starts another actor in its place, and gives
that one the message again, once: the work is a function of the message, so the sum is the one the dead actor would have
sent. Where a cluster has lost a node and has no room for another actor, whichever actor is idle next takes the message,
and the rounds go on with fewer. A message whose second actor dies too becomes an error reply, like any failed shard; if
too many of a round do, the strategy ends the run.

Flower has no place to plug a pool in, so two of its methods are replaced in the process that holds the pool (the one of
the ServerApp). ``tests/runs/test_actors.py`` fails if a later Flower calls them in another way.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.exceptions import OutOfMemoryError, RayActorError

from server import notice

log = logging.getLogger(__name__)

DEATHS = (RayActorError, OutOfMemoryError)
ROOM = 120.0
"""Seconds in which another actor must find room where none is left; a busy host takes half a minute to start one."""
_choosing = threading.Lock()


class NoWorkerLeft(RuntimeError):
    """Every worker has died, and Ray has room for none."""


_add: Callable[..., Any] = BasicActorPool.add_actors_to_pool
_submit: Callable[..., Any] = BasicActorPool.submit
_fetch: Callable[..., Any] = BasicActorPool.fetch_result_and_return_actor_to_pool


def replace_dead_actors() -> None:
    """From now on, in this process. Pools that exist already are included; calling it twice is fine."""
    BasicActorPool.submit = _remembering  # type: ignore[method-assign, assignment]
    BasicActorPool.fetch_result_and_return_actor_to_pool = _reviving  # type: ignore[method-assign, assignment]


def tell_when_ready(ready: threading.Event, most: int) -> None:
    """Set ``ready`` once Flower's next pool of actors is complete and every actor answers or has failed to start.

    Args:
        most: actors in that pool; Flower would have one wherever a cluster has room.
    """

    def add(pool: Any, number: int) -> None:
        notice.listen()  # Ray has taken SIGTERM for itself when it started
        _add(pool, min(number, most))
        waiting = [actor.__ray_ready__.remote() for actor in pool.pool]
        threading.Thread(target=_wait, args=(waiting, ready), name="ready", daemon=True).start()

    BasicActorPool.add_actors_to_pool = add  # type: ignore[method-assign, assignment]


def _wait(waiting: list[Any], ready: threading.Event) -> None:
    ray.wait(waiting, num_returns=len(waiting))
    ready.set()


def _remembering(pool: Any, actor_fn: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    while True:
        with _choosing:  # Flower has a thread for every actor that there was: fewer actors are waited for
            if pool.pool:
                future = _submit(pool, actor_fn, job)
                pool.__dict__.setdefault("jobs", {})[future] = (actor_fn, job)
                return future
        time.sleep(0.1)


def _reviving(pool: Any, future: Any) -> tuple[Any, Any]:
    actor_fn, job = pool.__dict__.get("jobs", {}).pop(future, (None, None))
    try:
        result: tuple[Any, Any] = _fetch(pool, future)
        return result
    except DEATHS as death:
        log.warning("a worker died (%s); another is started in its place", type(death).__name__)
        # Flower puts back whichever actor stands here, also after an error that is raised below.
        another = pool._future_to_actor[future] = _living(pool, future)
        if job is None:
            raise
    log.warning("what the dead worker was doing is done again")
    try:
        _, message, context = ray.get(actor_fn(another, *job))
    except DEATHS as death:
        log.warning("its replacement died at the same work (%s), which is given up", type(death).__name__)
        pool._future_to_actor[future] = pool.create_actor_fn()
        raise
    pool.add_actor_back_to_pool(future)
    return message, context


def _living(pool: Any, future: Any) -> Any:
    """Another actor in the place of the one that died at ``future``, or the next idle one where it finds no room."""
    another = pool.create_actor_fn()
    pool._future_to_actor[future] = None  # nobody works at it
    ready, alone_since = another.__ray_ready__.remote(), time.monotonic()
    while not ray.wait([ready], timeout=1.0)[0]:
        with _choosing:
            idle = pool.pool.pop() if pool.pool else None
        if idle is not None:
            log.warning("there is no room for another worker yet; one of those that are left takes its work")
            threading.Thread(target=_join, args=(pool, another, ready), name="join", daemon=True).start()
            return idle
        if any(actor is not None for actor in list(pool._future_to_actor.values())):
            alone_since = time.monotonic()
        if time.monotonic() - alone_since > ROOM:
            pool._future_to_actor[future] = another
            raise NoWorkerLeft(f"no worker lives, and Ray has found no room for another in {ROOM:.0f} s")
    return another


def _join(pool: Any, actor: Any, ready: Any) -> None:
    """Put an actor into the pool once Ray has found room for it."""
    ray.wait([ready])
    pool.pool.append(actor)
