"""The server's decisions between releases: controllers, server optimizers, LoRA aggregations.

Everything here is a function of releases and public data, so no guarantee depends on it: delete this package and every
epsilon still holds. The tables name what a configuration may choose; a name with a colon (``"my_pkg.mod:Thing"``) is
imported instead, which is how methods from outside the project plug in.
"""

CONTROLLERS = {
    "fixed": "strategies.controllers.fixed:Fixed",
    "dp-lac": "strategies.controllers.dp_lac:DpLac",
    "dp-clac": "strategies.controllers.dp_clac:DpClac",
    "quantile": "strategies.controllers.quantile:Quantile",
    "dynamic": "strategies.controllers.schedules:Dynamic",
    "rise-reset": "strategies.controllers.schedules:RiseReset",
    "automatic": "strategies.controllers.normalised:Automatic",
    "psac": "strategies.controllers.normalised:Psac",
    "adaclip": "strategies.controllers.adaclip:Adaclip",
    "geoclip": "strategies.controllers.geoclip:Geoclip",
    "percentile": "strategies.controllers.percentile:Percentile",
    "dc-sgd-p": "strategies.controllers.dc_sgd:DcSgdP",
    "dc-sgd-e": "strategies.controllers.dc_sgd:DcSgdE",
    "rl": "strategies.controllers.rl.controller:Rl",
}
OPTIMIZERS = {
    "fedavg": "strategies.optimizers.fedavg:FedAvg",
    "fedavgm": "strategies.optimizers.fedavg:FedAvgM",
    "fedadam": "strategies.optimizers.fedadam:FedAdam",
    "fedadamw": "strategies.optimizers.fedadam:FedAdamW",
}
AGGREGATIONS = {
    "plain": "strategies.aggregations.factors:Plain",
    "ffa": "strategies.aggregations.factors:Ffa",
    "rolora": "strategies.aggregations.factors:RoLora",
    "local-heads": "strategies.aggregations.factors:LocalHeads",
    "fedsvd": "strategies.aggregations.fedsvd:FedSvd",
    "dp-dylora": "strategies.aggregations.ranks:DyLora",
    "zero-pad": "strategies.aggregations.ranks:ZeroPad",
    "flora": "strategies.aggregations.individual:Flora",
    "fedex": "strategies.aggregations.individual:FedEx",
    "fedgsa": "strategies.aggregations.individual:FedGsa",
}
