"""What the server decides between releases: controllers, server optimizers, LoRA aggregations.

Everything here is a function of releases and public data, so no guarantee depends on it: delete this room and every
epsilon still holds. The tables name what a configuration may choose; a name with a colon (``"my_pkg.mod:Thing"``) is
imported instead, which is how methods from outside the project plug in.
"""

CONTROLLERS = {
    "fixed": "strategies.controllers.fixed:Fixed",
    "dp-lac": "strategies.controllers.dp_lac:DpLac",
}
OPTIMIZERS = {
    "fedavg": "strategies.optimizers.fedavg:FedAvg",
    "fedavgm": "strategies.optimizers.fedavg:FedAvgM",
}
AGGREGATIONS = {
    "plain": "strategies.aggregation.factors:Plain",
    "ffa": "strategies.aggregation.factors:Ffa",
}
