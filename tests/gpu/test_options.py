"""Every option on a GPU: in float32 what a CPU computes, and compiled what it computes uncompiled."""

import numpy as np
import pytest
import torch
from options import EVERY_OPTION

from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import build_model
from nexus_ablate.training.step import Step, forget_programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own import
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # PyTorch captures one to begin with
]

ROWS = np.random.default_rng(0).integers(0, 256, (2, 129))
SHAPE = ["model.context=128", "model.d_model=32", "train.batch_size=2"]
"""FlexAttention takes over from 128 queries and heads of 16 on."""
KEYS = [
    "train.activation_checkpointing=on",
    "z_loss=1e-3",
    "final_softcap=5",
    "n_kv_heads=1",
    "tie_embeddings=off",
    "train.loss=chunked",
]
MASKS = ["window=16", "attn_softcap=5", "kv_bias=key_value", "sink_token=on", "position=alibi window=16"]
MASKS += ["position=alibi attn_softcap=5 normalizer=sink", "position=t5 window=16", "window=16 sink_token=on"]
CASES = [*EVERY_OPTION, *KEYS, *MASKS]


def steps(tiny, device, override, compiled="off"):
    """Losses and gradient norms of three steps in float32, and the loss of each row after them."""
    execution = [f"train.device={device}", "train.precision=fp32", f"train.compile={compiled}"]
    config = tiny(*SHAPE, *execution, *override.split())
    step = Step(config, build_model(config).to(device).train(), 3, lambda number: ROWS)
    if compiled != "off":
        forget_programs()
        step.compile(ROWS)
    for number in range(3):
        step.take(number, ROWS)
    with evaluation_mode(step.model):
        after = step.window_losses(ROWS).tolist()
    return np.array([*((seen.loss, seen.norm) for seen in step.read()), after])


@pytest.mark.parametrize("override", CASES)
def test_three_steps_of_a_gpu_are_those_of_a_cpu(tiny, override):
    np.testing.assert_allclose(steps(tiny, "cuda", override), steps(tiny, "cpu", override), rtol=1e-3)


@pytest.mark.parametrize("compiled", ["on", "graphs"])
@pytest.mark.parametrize("override", CASES)
def test_a_compiled_step_of_a_gpu_computes_what_the_uncompiled_one_does(tiny, override, compiled):
    np.testing.assert_allclose(steps(tiny, "cuda", override, compiled), steps(tiny, "cuda", override), rtol=1e-3)


@pytest.mark.parametrize("compiled", ["off", "graphs"])
def test_dropout_is_drawn_anew_at_each_step_and_is_the_same_in_the_same_run(tiny, compiled):
    """At a learning rate that changes nothing, with the same rows at each step."""
    still = "model.dropout=0.3 optim.lr=1e-30"
    first, second = steps(tiny, "cuda", still, compiled), steps(tiny, "cuda", still, compiled)
    assert len({loss for loss, _ in first[:3]}) == 3
    np.testing.assert_array_equal(first, second)
