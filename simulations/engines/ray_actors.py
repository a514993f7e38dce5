"""Dead Ray actors are replaced, and what they were doing is done again.

Flower 1.41 puts an actor that died back into its pool, first in line: it fails every message it is handed at once, and
is handed the next one because it is free. A run with one dead worker of two so loses every message from then on, with
nothing but error replies to show for it. Here the pool notices the death, starts another actor in its place, and gives
that one the message again, once: the work is a function of the message, so the sum is the one the dead actor would have
sent. A message whose second actor dies too becomes an error reply, like any failed shard; if too many of a round do,
the strategy ends the run.

Flower has no place to plug a pool in, so two of its methods are replaced in the process that holds the pool (the one of
the ServerApp). ``tests/runs/test_actors.py`` fails if a later Flower calls them in another way.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.exceptions import OutOfMemoryError, RayActorError

log = logging.getLogger(__name__)

DEATHS = (RayActorError, OutOfMemoryError)

_add: Callable[..., Any] = BasicActorPool.add_actors_to_pool
_submit: Callable[..., Any] = BasicActorPool.submit
_fetch: Callable[..., Any] = BasicActorPool.fetch_result_and_return_actor_to_pool


def replace_dead_actors() -> None:
    """From now on, in this process. Pools that exist already are included; calling it twice is fine."""
    BasicActorPool.submit = _remembering  # type: ignore[method-assign, assignment]
    BasicActorPool.fetch_result_and_return_actor_to_pool = _reviving  # type: ignore[method-assign, assignment]


def tell_when_ready(ready: threading.Event) -> None:
    """Set ``ready`` once Flower's next pool of actors is complete and every actor answers or has failed to start."""

    def add(pool: Any, number: int) -> None:
        _add(pool, number)
        waiting = [actor.__ray_ready__.remote() for actor in pool.pool]
        threading.Thread(target=_wait, args=(waiting, ready), name="ready", daemon=True).start()

    BasicActorPool.add_actors_to_pool = add  # type: ignore[method-assign, assignment]


def _wait(waiting: list[Any], ready: threading.Event) -> None:
    ray.wait(waiting, num_returns=len(waiting))
    ready.set()


def _remembering(pool: Any, actor_fn: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    future = _submit(pool, actor_fn, job)
    pool.__dict__.setdefault("jobs", {})[future] = (actor_fn, job)
    return future


def _reviving(pool: Any, future: Any) -> tuple[Any, Any]:
    actor_fn, job = pool.__dict__.get("jobs", {}).pop(future, (None, None))
    try:
        result: tuple[Any, Any] = _fetch(pool, future)
        return result
    except DEATHS as death:
        log.warning("a worker died (%s); another is started in its place", type(death).__name__)
        # Flower puts back whichever actor stands here, also after the error that is raised below.
        another = pool._future_to_actor[future] = pool.create_actor_fn()
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
