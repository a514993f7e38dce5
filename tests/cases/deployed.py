"""The settings of runs over nodes that hold their own records, of a model that trains in a moment."""


def deployed_settings(*, clients: int, privacy: str, rounds: str = "{rounds}", cache: str = "{folder}/cache") -> str:
    """Return TOML text, with places for ``rounds`` and ``folder`` where they are not given."""
    return f"""
rounds = {rounds}
clients = {clients}
sampling-rate = 1.0
output = "runs"
[privacy]
{privacy}
[strategy]
controller = "fixed"
[model]
name = "random:bert"
rank = 2
max-length = 32
[data]
held-by = "nodes"
validation-records = 20
test-records = 20
cache = "{cache}"
"""
