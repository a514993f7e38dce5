"""A run over the records of one site: the same folder as a run over clients, and the same way of resuming."""

import numpy as np
from torch import Tensor

from client.models.tasks import Metrics
from client.record_level.public_subspace import in_public_span
from client.record_level.training import private_training, record_level_engine
from server.run_folder.canaries import canaries_of
from server.runs import guarantee
from server.runs.artefacts import Final
from server.runs.assembly import make_sampler
from server.runs.lifecycle import Run, best_round, ending_words, training_outcome
from server.runs.loop import Loop
from server.runs.public_data import PublicTraining, public_span
from server.runs.record_level_assembly import assemble_record_level


def run_record_level(run: Run) -> None:
    """Run a training over the records of one site, from configuration to artefacts.

    Args:
        run: with a configuration of one site (``config.is_single_site``).
    """
    run.status("preparing data, model and noise")
    config, assembly = run.config, assemble_record_level(run.config, run.folder)
    data = assembly.data
    public = PublicTraining.of(assembly)
    engine = record_level_engine(assembly.job, config.site.gradients)
    adapter, span = public_span(assembly, engine)
    run.note_start(data, assembly.commitment)
    splits = {
        "validation": data.validation.select(np.arange(public.num_records, len(data.validation))),
        "test": data.test,
    }

    def evaluate(adapter: Tensor, split: str) -> Metrics:
        return engine.evaluate(adapter, splits[split])

    def evaluated(step: int) -> bool:
        return step > 0 and (step % config.evaluation.every == 0 or step == config.rounds)

    with run.hold_ledger(assembly.commitment) as ledger:
        training = private_training(
            assembly.site,
            engine,
            assembly.index,
            ledger,
            assembly.setting.noise_multipliers,
            make_sampler(config, run.folder),
        )
        training.canaries = canaries_of(config, run.folder, len(assembly.index), fresh=not ledger.events)

        def keep(served: Tensor) -> None:
            if run.kept is None:
                statement = guarantee.record_level_statement(
                    config, ledger, steered=assembly.methods.steered_by_validation
                )
                run.keep(Final(served, assembly.layout, assembly.spec), statement, data)

        loop = Loop(
            training if span is None else in_public_span(training, span),
            evaluate,
            run.telemetry,
            run.folder,
            config.rounds,
            config.privacy.epsilon,
            evaluated=evaluated,
            clock=run.clock,
            recorded=lambda step: evaluated(step) or step == 0,
            kept=lambda step: evaluated(step) or step % config.site.checkpoint_every == 0,
            noun="step",
            watched=run.canary_watcher(len(assembly.index)),
            complete=keep,
            best=best_round(config, run.folder),
        )
        stopped = run.train(loop, lambda: public.warm_start(adapter), assembly.start)
        run.finish(training_outcome(run, assembly, loop, stopped), ending_words(loop))
