"""Dead actors are replaced, and their work is done again; on real Ray in tests/end_to_end."""

import inspect

import pytest
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport import ray_actor
from ray.exceptions import ActorDiedError

from simulations.engines import ray_actors


class Future:
    """What an actor was asked, and by whom."""

    def __init__(self, actor, job):
        self.actor, self.job = actor, job


class Pool(ray_actor.BasicActorPool):
    """Flower's pool with actors that need no Ray: a name, and whether it lives."""

    def __init__(self, actors):
        self.pool = list(actors)
        self.num_actors = len(actors)
        self._future_to_actor = {}
        self.made = 0
        self.create_actor_fn = self._create
        self.fate = True

    def _create(self):
        self.made += 1
        return {"name": f"new {self.made}", "alive": self.fate}


@pytest.fixture
def ray(monkeypatch):
    """Answers of actors without Ray; the pool is mended for the test only."""

    def get(future):
        if not future.actor["alive"]:
            raise ActorDiedError
        if future.job == "bad":
            raise ValueError("the client's own")
        return "cid", f"{future.job} by {future.actor['name']}", "context"

    for name in ("submit", "fetch_result_and_return_actor_to_pool"):
        monkeypatch.setattr(ray_actor.BasicActorPool, name, getattr(ray_actor.BasicActorPool, name))
    monkeypatch.setattr(ray_actor.ray, "get", get)
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


def alive(name="old"):
    return {"name": name, "alive": True}


def test_a_living_actor_works_as_before(ray):
    pool = Pool([alive()])
    assert process(pool, "work") == ("work by old", "context")
    assert [actor["name"] for actor in pool.pool] == ["old"]
    assert pool.made == 0


def test_a_dead_actor_is_replaced_and_its_work_done_again(ray):
    pool = Pool([alive("other"), {"name": "dead", "alive": False}])
    assert process(pool, "work") == ("work by new 1", "context")
    assert [actor["name"] for actor in pool.pool] == ["other", "new 1"]
    assert process(pool, "more") == ("more by new 1", "context")
    assert pool.made == 1


def test_work_that_kills_every_actor_is_given_up_but_the_pool_stays_whole(ray):
    pool = Pool([{"name": "dead", "alive": False}])
    pool.fate = False
    with pytest.raises(ActorDiedError):
        process(pool, "work")
    assert len(pool.pool) == 1
    pool.pool[0]["alive"] = True
    assert process(pool, "more") == ("more by new 2", "context")


@pytest.mark.parametrize("dead", [False, True])
def test_an_exception_of_the_client_replaces_nobody_but_the_dead(dead, ray):
    pool = Pool([{"name": "old", "alive": not dead}])
    with pytest.raises(ValueError, match="the client's own"):
        process(pool, "bad")
    assert [actor["name"] for actor in pool.pool] == ["new 1" if dead else "old"]
    assert pool.made == int(dead)


def test_flower_still_has_what_is_replaced():
    """The tests above run Flower's own process_message; this names what else it must not have changed."""
    source = inspect.getsource(ray_actor.BasicActorPool)
    assert "self._future_to_actor" in source
    assert "self.create_actor_fn" in source
