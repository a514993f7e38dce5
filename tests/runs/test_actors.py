"""Dead actors are replaced, and their work is done again; on real Ray in tests/end_to_end."""

import inspect
import threading
import time
from types import SimpleNamespace

import pytest
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport import ray_actor
from ray.exceptions import ActorDiedError

from simulations.engines import ray_actors


class Future:
    """What an actor was asked, and by whom."""

    def __init__(self, actor, job):
        self.actor, self.job = actor, job


class Actor:
    """A worker without Ray.

    Args:
        alive: whether it answers.
        room: whether Ray has a place for it.
    """

    def __init__(self, name="old", alive=True, room=True):
        self.name, self.alive, self.room = name, alive, room
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self)


class Pool(ray_actor.BasicActorPool):
    """Flower's pool with actors that need no Ray: a name, and whether it lives."""

    def __init__(self, actors):
        self.pool = list(actors)
        self.num_actors = len(actors)
        self._future_to_actor = {}
        self.made = 0
        self.create_actor_fn = self._create
        self.fate = self.room = True

    def _create(self):
        self.made += 1
        return Actor(f"new {self.made}", self.fate, self.room)


@pytest.fixture
def ray(monkeypatch):
    """Answers of actors without Ray; the pool is mended for the test only."""

    def get(future):
        if not future.actor.alive:
            raise ActorDiedError
        if future.job == "bad":
            raise ValueError("the client's own")
        return "cid", f"{future.job} by {future.actor.name}", "context"

    for name in ("submit", "fetch_result_and_return_actor_to_pool"):
        monkeypatch.setattr(ray_actor.BasicActorPool, name, getattr(ray_actor.BasicActorPool, name))

    def wait(actors, timeout=None):
        while not actors[0].room and timeout is None:
            time.sleep(0.01)
        return (actors, []) if actors[0].room else ([], actors)

    monkeypatch.setattr(ray_actor.ray, "get", get)
    monkeypatch.setattr(ray_actors.ray, "wait", wait)
    ray_actors.replace_dead_actors()
    ray_actors.replace_dead_actors()


def process(pool, job):
    """Flower's RayBackend.process_message, from submission to the end."""
    backend = raybackend.RayBackend.__new__(raybackend.RayBackend)
    backend.pool, backend.app_fn = pool, "app"

    class Message:
        def __init__(self):
            self.node_config = {"partition-id": 0}

    real = pool.submit
    pool.submit = lambda actor_fn, arguments: real(lambda actor, *_: Future(actor, job), arguments)
    try:
        return backend.process_message("message", Message())
    finally:
        del pool.submit


def test_a_living_actor_works_as_before(ray):
    pool = Pool([Actor()])
    assert process(pool, "work") == ("work by old", "context")
    assert [actor.name for actor in pool.pool] == ["old"]
    assert pool.made == 0


def test_a_dead_actor_is_replaced_and_its_work_done_again(ray):
    pool = Pool([Actor("other"), Actor("dead", alive=False)])
    assert process(pool, "work") == ("work by new 1", "context")
    assert [actor.name for actor in pool.pool] == ["other", "new 1"]
    assert process(pool, "more") == ("more by new 1", "context")
    assert pool.made == 1


def test_work_that_kills_every_actor_is_given_up_but_the_pool_stays_whole(ray):
    pool = Pool([Actor("dead", alive=False)])
    pool.fate = False
    with pytest.raises(ActorDiedError):
        process(pool, "work")
    assert len(pool.pool) == 1
    pool.pool[0].alive = True
    assert process(pool, "more") == ("more by new 2", "context")


@pytest.mark.parametrize("dead", [False, True])
def test_an_exception_of_the_client_replaces_nobody_but_the_dead(dead, ray):
    pool = Pool([Actor(alive=not dead)])
    with pytest.raises(ValueError, match="the client's own"):
        process(pool, "bad")
    assert [actor.name for actor in pool.pool] == ["new 1" if dead else "old"]
    assert pool.made == int(dead)


def test_without_room_for_another_worker_one_that_is_left_takes_the_work(ray):
    pool = Pool([Actor("other"), Actor("dead", alive=False)])
    pool.room = False
    assert process(pool, "work") == ("work by other", "context")
    assert [actor.name for actor in pool.pool] == ["other"]


def test_a_worker_that_finds_room_later_joins_the_others(ray, monkeypatch):
    pool, made = Pool([Actor("other"), Actor("dead", alive=False)]), []
    monkeypatch.setattr(pool, "create_actor_fn", lambda: made.append(Actor("late", room=False)) or made[-1])
    process(pool, "work")
    made[0].room = True
    deadline = time.monotonic() + 30
    while len(pool.pool) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [actor.name for actor in pool.pool] == ["other", "late"]


def test_work_waits_for_a_worker_where_there_are_fewer_than_there_were(ray):
    pool = Pool([])
    later = threading.Timer(0.3, lambda: pool.pool.append(Actor("back")))
    later.start()
    assert process(pool, "work") == ("work by back", "context")
    later.join()


def test_where_no_worker_is_left_the_work_fails_in_words(ray, monkeypatch):
    monkeypatch.setattr(ray_actors, "ROOM", 0.0)
    pool = Pool([Actor("dead", alive=False)])
    pool.room = False
    with pytest.raises(ray_actors.NoWorkerLeft, match="no worker lives"):
        process(pool, "work")
    assert len(pool.pool) == 1  # which Ray may find room for yet


def test_flower_still_has_what_is_replaced():
    """The tests above run Flower's own process_message; this names what else it must not have changed."""
    source = inspect.getsource(ray_actor.BasicActorPool)
    assert "self._future_to_actor" in source
    assert "self.create_actor_fn" in source
