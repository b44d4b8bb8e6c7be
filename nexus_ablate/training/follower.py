"""A distributed run in a process other than the first: it takes the same steps and writes nothing."""

from __future__ import annotations

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import Batches, TokenizedData
from nexus_ablate.errors import AGAIN, Preempted
from nexus_ablate.training.distributed import World
from nexus_ablate.training.signals import StopRequest
from nexus_ablate.training.start import initial_model
from nexus_ablate.training.step import Step, steps_of


def follow(config: RunConfig, data: TokenizedData, world: World) -> None:
    """Take the training steps of a run on this process's rows of each batch.

    Raises:
        Diverged: A loss or a gradient was not finite, as in the first process.
        Preempted: All processes stop after this step.
    """
    train = config.train
    with StopRequest() as stop:
        world.stop = stop
        model = initial_model(config, data.vocab_size).to(world.device)
        tokens = train.batch_size * train.grad_accum
        batches = Batches(data.train, config.seed, tokens, config.model.context, data.period)
        steps = steps_of(config, data.vocab_size)
        step = Step(config, model, steps, batches.batch, world, data.answers)
        number = step.distribute(0)
        model.train()
        if step.compiled:
            step.compile(batches.batch(number))
        while number < steps:
            step.take(number, batches.batch(number))
            number += 1
            if number % train.log_every == 0 or number == steps:
                step.read()
            if number < steps and world.stopping(number):
                raise Preempted(f"stopped at step {number} of {steps}", "a signal", AGAIN)
