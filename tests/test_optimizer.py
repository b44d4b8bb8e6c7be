import math
from collections import defaultdict

import pytest
import torch
from options import OPTIMIZERS
from tensors import TOKENS, draw, next_token_loss

from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import option_files
from nexus_ablate.kernels import normuon
from nexus_ablate.model import build_model
from nexus_ablate.optimizers import OPTIM, build_optimizer, decay_groups
from nexus_ablate.training.gradients import GradientNorms, part_of
from nexus_ablate.training.step import Step


def model_of(tiny, *overrides):
    return build_model(tiny("bias=on", "position=learned", "tie_embeddings=off", *overrides), 11)


def optim(*overrides):
    return compose(list(overrides)).optim


def schedule_of(*overrides):
    return compose(list(overrides)).schedule


def three_steps(model, optimizer):
    """Weights after three steps whose gradients stay alike."""
    for _ in range(3):
        loss = next_token_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_decay_groups_are_what_their_names_say(tiny):
    model = model_of(tiny)
    shapes = {n: p.ndim for n, p in model.named_parameters()}
    tables = {"embedding.weight", "position.table.weight"}
    matrices = {n for n, d in shapes.items() if d > 1}
    for decay, names in {"matrices": matrices - tables, "matrices_embeddings": matrices, "all": {*shapes}}.items():
        groups = decay_groups(model, decay)
        assert set(groups["decayed"]) == names and set(groups["free"]) == shapes.keys() - names


def test_a_tied_head_counts_as_the_embedding(tiny):
    assert "embedding.weight" in decay_groups(build_model(tiny(), 11), "matrices")["free"]


def test_a_matrix_without_a_role_is_refused(tiny):
    model = build_model(tiny(), 11)
    model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"extra\.weight"):
        parameter_roles(model)


def test_warm_up_is_linear_and_then_each_schedule_ends_where_it_says():
    for schedule in ("cosine", "linear", "wsd"):
        config = schedule_of(f"optim.schedule={schedule}", "optim.lr=1.0", "optim.warmup=10", "optim.final_lr=0.1")
        rates = [config.rate(s, 100) for s in range(101)]
        assert rates[:10] == pytest.approx([(s + 1) / 11 for s in range(10)])
        assert max(rates) == rates[10] == 1.0
        assert rates[100] == pytest.approx(0.1)
    assert schedule_of("optim.schedule=constant", "optim.lr=0.5", "optim.warmup=3").rate(99, 100) == 0.5


def test_cosine_is_nanogpt_s_formula():
    config = schedule_of("optim.lr=1e-3", "optim.warmup=100")
    for step in (100, 700, 1999):
        ratio = (step - 100) / (2000 - 100)
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-3 - 1e-4)
        assert config.rate(step, 2000) == pytest.approx(expected)


def test_wsd_holds_the_peak_and_then_cools_linearly():
    config = schedule_of(
        "optim.schedule=wsd", "optim.lr=1.0", "optim.warmup=0", "optim.cooldown=0.2", "optim.final_lr=0.0"
    )
    rates = [config.rate(s, 100) for s in range(100)]
    assert rates[:81] == [1.0] * 81
    assert rates[90] == pytest.approx(0.5)


def test_automatic_warm_up_suits_short_and_long_runs():
    assert [schedule_of().warmup_steps(steps) for steps in (8, 80, 800, 2000, 100_000)] == [1, 10, 100, 100, 1000]


def test_gradient_norms_are_torch_s_in_all_by_part_and_by_role(tiny):
    model = model_of(tiny)
    model(TOKENS).square().sum().backward()
    norms, roles, members = GradientNorms(model), parameter_roles(model), defaultdict(list)
    for name, p in model.named_parameters():
        for part in ("", part_of(name), f"role/{roles[name]}"):
            members[part].append(p.grad)
    total, by_part = norms.measure()
    assert norms.parts == sorted(members)[1:]
    expected = [torch.nn.utils.get_total_norm(members[part]) for part in ("", *norms.parts)]
    torch.testing.assert_close(torch.stack((total, *by_part)), torch.stack(expected))


@pytest.mark.parametrize("clip", ["0.01", "1e9", "off"])
def test_a_step_clips_the_global_norm_of_its_gradients(tiny, monkeypatch, clip):
    rows = TOKENS.numpy()
    step = Step(tiny(f"optim.clip={clip}", "train.batch_size=2"), model_of(tiny).train(), 3, lambda number: rows)
    seen = []

    def norm_at_the_step():
        gradients = [p.grad for p in step.model.parameters()]
        seen.append(torch.nn.utils.get_total_norm(gradients).item())

    monkeypatch.setattr(step.optimizer, "step", norm_at_the_step)
    step.take(0, rows)
    (measured,) = step.read()
    assert seen == [pytest.approx(0.01 if clip == "0.01" else measured.norm, rel=1e-4)] and measured.norm > 0.02


def test_parts_are_named_for_sorting():
    assert part_of("blocks.3.attn.query.weight") == "block_003/attn"
    assert part_of("blocks.12.ffn.up.bias") == "block_012/ffn"
    assert part_of("blocks.0.norm_attn.gain") == "block_000/norm"
    assert part_of("embedding.weight") == "embedding"


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_step_is_pytorch_s_fused_adamw_to_the_bit(tiny, weight_decay):
    actual, expected = model_of(tiny), model_of(tiny)
    config = optim("optim.lr=0.01")
    optimizer = build_optimizer(actual, config, weight_decay)
    named, groups = dict(expected.named_parameters()), decay_groups(expected, "matrices")
    reference = torch.optim.AdamW(
        [
            {"params": [named[n] for n in groups["decayed"]], "weight_decay": weight_decay},
            {"params": [named[n] for n in groups["free"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for rate in (0.01, 0.02, 0.005):
        for model, stepper in ((actual, optimizer), (expected, reference)):
            for group in stepper.param_groups:
                group["lr"] = rate
            model(TOKENS).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    for name, p in actual.named_parameters():
        assert torch.equal(p, named[name]), name
    held = optimizer.tensors()
    assert len(held) == 3 * len(named)
    for name, tensor in held.items():
        parameter, _, key = name.rpartition("/")
        assert torch.equal(tensor, reference.state[named[parameter]][key]), name


@pytest.mark.parametrize(("fused", "cautious"), [(True, "off"), (False, "off"), (True, "on")])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(tiny, fused, cautious):
    model = model_of(tiny)
    optimizer = build_optimizer(model, optim(f"optim.cautious_decay={cautious}"), 0.1, fused)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    kept = [t.detach().clone() for t in (*model.parameters(), *optimizer.tensors().values())]
    optimizer.skip_where(torch.tensor(1.0))
    optimizer.step()
    assert any(p.grad.any() for p in model.parameters())
    now = [*model.parameters(), *optimizer.tensors().values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


# ------------------------------------------------------------------------------------------------- every optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_shrinks_what_decays_and_nothing_else(tiny, name):
    """Without gradients a step is weight decay alone, w (1 - lr weight_decay), on the roles that decay."""
    model = model_of(tiny)
    optimizer = build_optimizer(model, optim(f"optim={name}", "optim.lr=0.01"), 0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2 if name == "soap" else 1):  # whose first step begins the preconditioners alone
        optimizer.step()
    decayed = set(decay_groups(model, "matrices")["decayed"])
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[n] * (1 - 0.005 * (n in decayed)), msg=n)


KEYS = [
    (name, key, spec.default)
    for name in OPTIMIZERS
    for key, spec in option_files("optim")[name].keys.items()
    if key in OPTIM.keys_of(name)
]


@pytest.mark.parametrize(("name", "key", "default"), KEYS, ids=[f"{name}.{key}" for name, key, _ in KEYS])
def test_every_key_of_an_optimizer_changes_its_steps(tiny, name, key, default):
    other = not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else default * 0.5
    other = {"clip_threshold": 2.0, "precondition_frequency": 1, "max_precondition_dim": 8}.get(key, other)
    plain, changed = model_of(tiny), model_of(tiny)
    chosen = optim(f"optim={name}")
    altered = optim(f"optim={name}", f"optim.{key}={other}")
    weights = three_steps(plain, build_optimizer(plain, chosen, 0.1))
    assert not torch.equal(weights, three_steps(changed, build_optimizer(changed, altered, 0.1)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cautious_decay_is_the_step_without_decay_and_decay_where_it_moves_a_weight_towards_0(tiny, name):
    """Chen et al. 2025, arXiv:2510.12402: x <- x - lr (u + weight_decay [u x >= 0] x), for every optimizer."""
    cautious, plain = model_of(tiny), model_of(tiny)
    keys = [f"optim={name}", "optim.lr=0.01"]
    decaying = build_optimizer(cautious, optim(*keys, "optim.cautious_decay=on"), 0.5)
    undecayed = build_optimizer(plain, optim(*keys), 0.0)
    decayed = set(decay_groups(plain, "matrices")["decayed"])
    for _ in range(3):
        for model, optimizer in ((cautious, decaying), (plain, undecayed)):
            optimizer.zero_grad()
            next_token_loss(model).backward()
        before = {n: p.detach().clone() for n, p in plain.named_parameters()}
        decaying.step()
        undecayed.step()
        shares = []
        for (n, p), (_, q) in zip(cautious.named_parameters(), plain.named_parameters(), strict=True):
            inwards = ((before[n] - q) * before[n] >= 0) & (n in decayed)
            torch.testing.assert_close(p.detach(), q.detach() - 0.005 * inwards * before[n], msg=n)
            shares += [inwards.float().mean().item()] if n in decayed else []
            q.data.copy_(p)
        assert name == "soap" or 0.3 < sum(shares) / len(shares) < 0.8


def test_cautious_decay_without_weight_decay_is_one_spelling_and_old_configurations_mean_off():
    assert compose(["weight_decay=0", "optim.cautious_decay=on"]).science() == compose(["weight_decay=0"]).science()
    assert "cautious_decay" not in compose([]).science()["optim"]
    assert compose(["optim.cautious_decay=on"]).science()["optim"]["cautious_decay"] is True


@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_normuon_is_the_paper_s_algorithm_written_out_in_float64(monkeypatch, shape, nesterov):
    """Li et al. 2025, arXiv:2510.05491, Alg. 1, with the iterations in float64 too."""
    monkeypatch.setattr(normuon, "PRECISION", torch.float64)
    weight = torch.nn.Parameter(draw(*shape).double())
    steps = normuon.NorMuonSteps([{"params": [weight], "weight_decay": 0.1}], 0.02, 0.95, nesterov, 5, 0.9)
    x, momentum, v = weight.detach().clone(), torch.zeros(shape).double(), torch.zeros(shape[0]).double()
    for t in range(4):
        gradient = draw(*shape, seed=t + 1).double()
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.05 * gradient + 0.95 * momentum if nesterov else momentum
        left, values, right = torch.linalg.svd(direction / (direction.norm() + 1e-7), full_matrices=False)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        update = left @ values.diag() @ right
        v = 0.9 * v + 0.1 * (update**2).mean(1)
        update = update / (v.sqrt() + 1e-10)[:, None]
        size = 0.2 * 0.02 * math.sqrt(update.numel()) / update.norm()
        x = x - 0.02 * 0.1 * x - size * update
        weight.grad = gradient
        steps.step()
        torch.testing.assert_close(weight.detach(), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_from_its_saved_tensors(tiny, name):
    one, other = model_of(tiny), model_of(tiny)
    first, second = (build_optimizer(m, optim(f"optim={name}"), 0.1) for m in (one, other))
    three_steps(one, first)
    other.load_state_dict(one.state_dict())
    second.load({key: value.clone() for key, value in first.tensors().items()})
    assert torch.equal(three_steps(one, first), three_steps(other, second))


def test_an_optimizer_of_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path, capsys):
    from nexus_ablate.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert main(["optim=lion", "tracker=files"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "pip install 'nexus-ablate[optimizers]'" in lines[2]
    assert not any(tmp_path.iterdir())


def test_the_state_of_a_scalar_comes_back_to_the_device_of_the_scalar(tiny):
    """`meta` stands for a GPU. The count of the steps stays on the CPU, where Adafactor reads it."""
    config = tiny("optim=adafactor", "norm=dyt", "embed_scale=learned")
    model = build_model(config, 11)
    trained = build_optimizer(model, config.optim, 0.1)
    trained.set_learning_rate(0.1)
    model(torch.zeros(1, 8, dtype=torch.long)).square().mean().backward()
    trained.step()
    loaded = build_optimizer(model.to("meta"), config.optim, 0.1)
    loaded.load(trained.tensors())
    places = {name: tensor.device.type for name, tensor in loaded.tensors().items()}
    assert {place for name, place in places.items() if name.endswith("/step")} == {"cpu"}
    assert {place for name, place in places.items() if not name.endswith("/step")} == {"meta"}
