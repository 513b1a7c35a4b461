"""The four aggregations inside verl's own unmodified code: every logit's gradient against float64
loops.
"""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from megatron_pg.integrations.reducers import HOOKS
from tests import oracle
from tests.distributed.launch import run_ranks

from . import logit_table
from .logit_table import LENGTHS, TOLERANCE, difference, step_of
from .sources import find_verl
from .verl_step import CLIP_C, Case, gradients, verl_advantages

missing = find_verl()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

ROOT = Path(__file__).parents[2]
DIVISOR = 8
OURS = tuple(f"megatron_pg_{aggregation}" for aggregation in HOOKS)
OF_GSPO = tuple(f"{mode}_gspo" for mode in OURS)
THEIRS = {
    "seq-mean-token-mean": "sample_mean",
    "token-mean": "token_mean",
    "seq-mean-token-sum-norm": "constant",
}
"""verl's own settings that are one of the four already."""


def cases(context: int) -> list[Case]:
    """Ours in both of Megatron's modes, with KL and entropy, and of GSPO; verl's own, without; then
    the mutants.

    verl before 0.9 returns no token counts: the plugin refuses context parallelism there, and
    per-token mode is left out. In that mode 0.9.0 and main refuse `seq-mean-token-mean`, so KL and
    entropy are token means there.
    """
    if not counts_tokens() and context > 1:
        return [Case(mode, context=context, loss_scale_factor=DIVISOR) for mode in OURS]
    of = functools.partial(Case, context=context, loss_scale_factor=DIVISOR)
    return [
        *(of(mode) for mode in OURS),
        *(of(mode, per_token=True, loss_agg_mode="token-mean") for mode in OURS if counts_tokens()),
        *(of(mode) for mode in OF_GSPO),
        *(of("vanilla", loss_agg_mode=mode, with_terms=False) for mode in THEIRS),
        *(of(mode, breakage="divisor") for mode in OURS),
        of("megatron_pg_token_mean", breakage="length"),
        *(of(mode, breakage="window") for mode in OURS[:2]),
    ]


def expected(case: Case, step: list[oracle.PlainSample]) -> Tensor:
    aggregation = case.loss_mode.removeprefix("megatron_pg_").removesuffix("_gspo")
    if case.loss_mode == "vanilla":
        aggregation = THEIRS[case.loss_agg_mode]
    grpo = verl_advantages(step, dataclasses.replace(case, loss_mode="vanilla"))
    step = [
        dataclasses.replace(sample, advantages=row[: sample.response_length].tolist())
        for sample, row in zip(step, grpo, strict=True)
    ]
    coefs = {"kl_loss_coef": logit_table.KL_COEF, "entropy_coef": logit_table.ENTROPY_COEF}
    terms = coefs if case.with_terms else {}
    is_gspo = case.loss_mode.endswith("_gspo")
    held = None if is_gspo else CLIP_C
    policy = logit_table.objective(aggregation, DIVISOR, eps_clip_c=held)
    of_terms = logit_table.objective(
        THEIRS[case.loss_agg_mode], DIVISOR, regularizer_aggregation="loss"
    )

    def loss(logits: list[Tensor]) -> Tensor:
        result = oracle.policy_loss(step, logits, of_terms)
        regularizers = terms.get("kl_loss_coef", 0.0) * result.kl_loss
        regularizers = regularizers - terms.get("entropy_coef", 0.0) * result.entropy
        if is_gspo:
            return gspo(step, logits, policy) + regularizers
        return oracle.policy_loss(step, logits, policy).pg_loss + regularizers

    return logit_table.gradient(step, loss)


def gspo(
    step: list[oracle.PlainSample], logits: list[Tensor], objective: oracle.Objective
) -> Tensor:
    """One ratio for a sequence, whose gradient goes through each token's log-prob."""
    losses = []
    for sample, rows in zip(step, logits, strict=True):
        log_probs = [
            oracle.log_prob_and_entropy(rows[p - 1], sample.tokens[p])[0]
            for p in range(sample.prompt_length, len(sample.tokens))
        ]
        pairs = zip(log_probs, sample.old_log_probs, sample.loss_mask, strict=True)
        changes = [float(new.detach()) - old for new, old, mask in pairs if mask]
        mean = sum(changes) / max(len(changes), 1)
        ratios = [(mean + new - new.detach()).exp() for new in log_probs]
        pairs = zip(ratios, sample.advantages, strict=True)
        losses.append(oracle.stack([oracle.ppo_token_loss(*pair, objective) for pair in pairs]))
    return oracle.aggregate(
        step, losses, objective.loss_aggregation, objective.loss_aggregation_divisor
    )


def counts_tokens() -> bool:
    from verl.workers.engine.megatron import transformer_impl

    return "calculate_per_token_loss" in Path(transformer_impl.__file__).read_text()


@functools.cache
def on_two_ranks() -> list[list[Tensor]]:
    return run_ranks(gradients, 2, step_of(LENGTHS), cases(2) + cases(1))


@pytest.mark.parametrize("cut", ["one", "cp_2", "dp_2"])
def test_every_logits_gradient_and_none_of_mutants(cut):
    """On every rank the sound cases have the gradient of the loops, and the mutants have not."""
    if cut == "cp_2" and not counts_tokens():
        pytest.skip("this verl returns no token counts: see the refusal")
    step, made = step_of(LENGTHS), cases(2 if cut == "cp_2" else 1)
    assert sum(bool(case.breakage) for case in made) == 7 < len(made)
    if cut == "one":
        ranks = [gradients(step, made)]
    else:
        part = slice(0, len(made)) if cut == "cp_2" else slice(-len(made), None)
        ranks = [rank[part] for rank in on_two_ranks()]
    for case, *found in zip(made, *ranks, strict=True):
        errors = [difference(each, expected(case, step)) for each in found]
        if case.breakage:
            assert errors[0] > 20 * TOLERANCE, case
        else:
            assert max(errors) <= TOLERANCE, case


def test_context_parallelism_without_token_counts_is_refused():
    if counts_tokens():
        pytest.skip("this verl returns token counts")
    for rank in run_ranks(gradients, 2, step_of(LENGTHS), cases(2)):
        assert all("context_parallel_size=2: this verl returns no token count" in m for m in rank)


def test_modes_differ():
    step = step_of(LENGTHS)
    sample_mean = expected(Case("megatron_pg_sample_mean"), step)
    for mode in OURS[1:]:
        assert difference(expected(Case(mode), step), sample_mean) > 0.05


def test_the_floor():
    """verl counts `tokens // CP` of a micro-batch: the factor that the docs give, for every
    term.
    """
    if not counts_tokens():
        pytest.skip("this verl returns no token counts")
    step = step_of([(2, [1, 1, 1]), (2, [1, 1, 0, 1]), (1, [1, 1, 1, 1, 1, 1])])
    case = Case("megatron_pg_sample_mean", True, "token-mean", context=2, micro_batch_size=1)
    tokens = [len(sample.tokens) for sample in step]
    factor = sum(tokens) / (2 * sum(n // 2 for n in tokens))
    assert tokens == [5, 6, 7] and factor == 18 / 16
    for (found,) in run_ranks(gradients, 2, step, [case]):
        assert difference(found, factor * expected(case, step)) <= TOLERANCE


def test_refusals(monkeypatch):
    from megatron_pg.integrations import verl as ours

    monkeypatch.setattr(ours, "_seen_tagged", False)

    class Unfolded(Case):
        estimator = "grpo"

    class Folded(Case):
        estimator = "megatron_pg_prompt_mean_grpo"

    refused = {
        "algorithm.adv_estimator=megatron_pg_prompt_mean_grpo": Unfolded("megatron_pg_prompt_mean"),
        "loss_scale_factor": Case("megatron_pg_constant"),
        "policy_loss.loss_mode=megatron_pg_prompt_mean": Folded("vanilla"),
    }
    found = gradients(step_of(LENGTHS), list(refused.values()))
    assert all(words in message for words, message in zip(refused, found, strict=True))


def test_every_estimator_runs_on_what_verl_hands_to_it():
    """By our name: ReMax, say, has baselines only where its own is asked for."""
    from verl.trainer.ppo import core_algos

    from megatron_pg.integrations.verl import PREFIX, register

    register()
    names = [name for name in core_algos.ADV_ESTIMATOR_REGISTRY if str(name).startswith(PREFIX)]
    assert f"{PREFIX}prompt_mean_rloo" in names
    for name in names:

        class Ours(Case):
            estimator = name

        assert verl_advantages(step_of(LENGTHS), Ours("megatron_pg_prompt_mean")).isfinite().all()


def command(tmp_path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m megatron_pg integrations verl` of an installation with the entry points that
    setup.py has.
    """
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{before}\n"
        "from tests.trainers.sources import find_verl; find_verl()\n"
        "from megatron_pg.cli import main; sys.exit(main(['integrations', 'verl']))"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command_sees_the_plugin(tmp_path):
    done = command(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plugin: entry point megatron_pg" in done.stdout
    assert f"loss_mode): {', '.join(sorted(OURS + OF_GSPO))}\n" in done.stdout
    assert "megatron_pg_prompt_mean_grpo" in done.stdout


def test_the_command_reports_what_verl_swallows(tmp_path):
    done = command(tmp_path, "sys.modules['megatron_pg.integrations.verl_plugin'] = None")
    assert done.returncode == 1
    assert "verl logged: Failed to load plugin 'megatron_pg'" in done.stdout
    assert "loss_mode): none" in done.stdout
