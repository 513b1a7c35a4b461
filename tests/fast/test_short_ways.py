"""How far a reader walks: the way of a micro-batch, from the logits to the page, and the files
behind a gradient.

`python -m pytest -s tests/fast/test_short_ways.py` prints the ways.
"""

import ast
import itertools
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_pg as pg
from megatron_pg.megatron import PolicyStep
from megatron_pg.megatron.groups import ParallelGroups
from tests.random_steps import package_samples, random_step

PACKAGE = Path(pg.__file__).parent
CONFIG = pg.PolicyLossConfig(loss_aggregation="prompt_mean", kl_loss_coef=0.1)
OF_A_GRADIENT = (
    *("policy_loss", "regularizers", "aggregation", "tokens"),
    *("../step/totals", "../step/token_window", "../megatron/scale_contract"),
)
"""The files, from loss/, that say which gradient `prompt_mean` with KL has under context
parallelism."""


@pytest.fixture(scope="module")
def step():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    totals = pg.step_totals(package_samples(random_step(1)), allow_different_group_sizes=True)
    groups = ParallelGroups(*[dist.group.WORLD] * 5)
    yield PolicyStep(CONFIG, totals=totals, num_microbatches=1, groups=groups)
    dist.destroy_process_group()


@pytest.fixture
def batch():
    return pg.pack(package_samples(random_step(1)))


def frames_of_calls(function):
    """Every frame that the package began during a call, in order."""
    frames = []

    def record(frame, event, _):
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frames.append(frame)

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return frames


def test_the_way_of_a_micro_batch_is_short(step, batch):
    """At most 14 calls get the batch or its window, in at most 8 files, with at most 4 returns to a
    file that was left.
    """
    calls = []
    for frame in frames_of_calls(lambda: step.head(batch)):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names if name != "self"]
        if any(value is batch or value is batch.window for value in values):
            calls.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))
    print(*calls, sep="\n")
    stays = [file for file, _ in itertools.groupby(file for file, _ in calls)]
    assert calls[0][1] == "PolicyStep.head" and len(calls) > 5
    assert len(calls) <= 14
    assert len(set(stays)) <= 8
    assert len(stays) - len(set(stays)) <= 4


def test_args_in_the_place_of_a_config_are_refused():
    with pytest.raises(TypeError, match=r"a Namespace, .*PolicyLossConfig.from_args\(args\)"):
        PolicyStep(Namespace(**vars(CONFIG)))  # type: ignore[arg-type]


def test_three_calls_lead_from_the_logits_to_the_page(step, batch):
    loss_func = step.head(batch).loss_func
    logits = torch.zeros(batch.window.local_tokens, 100)
    frames = frames_of_calls(lambda: loss_func(logits))
    frame = next(frame for frame in frames if frame.f_code.co_name == "policy_loss")
    names = [frame.f_code.co_name]
    while names[0] != "loss_of_logits":
        frame = frame.f_back
        names.insert(0, frame.f_code.co_name)
    print(*names, sep=" -> ")
    assert len(names) - 1 <= 3


def test_a_gradient_is_read_in_seven_files_and_the_page_in_sixty_lines():
    files = [(PACKAGE / "loss" / f"{name}.py").resolve() for name in OF_A_GRADIENT]
    lines = [len(file.read_text().splitlines()) for file in files]
    print(*zip(files, lines, strict=True), sum(lines), sep="\n")
    assert len(files) <= 7 and sum(lines) <= 1400
    tree = ast.parse(files[0].read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    words = [node for node in nodes if isinstance(node.value, ast.Constant)]
    prose = {line for node in words for line in range(node.lineno, node.end_lineno + 1)}
    text = enumerate(files[0].read_text().splitlines(), 1)
    code = [line for number, line in text if line.strip() and number not in prose]
    print(len(code), "lines of code on the page")
    assert len(code) <= 60
