"""`explain --html`: the data of the page against plain loops over the rows, what it keeps of many,
and what it refuses.
"""

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from megatron_pg import PolicyLossConfig
from megatron_pg.explain import main as explain
from megatron_pg.explain import rollout_page
from megatron_pg.explain.rollout_page import AT_RANDOM, write_rollout_page
from megatron_pg.rollout_files import RolloutFiles

CONFIG = PolicyLossConfig(eps_clip=0.1, eps_clip_high=0.2)
COLUMNS = ("log_probs", "rollout_log_probs", "ref_log_probs", "new_log_probs")
RATIOS = {
    "new_old": ("new_log_probs", "log_probs"),
    "old_rollout": ("log_probs", "rollout_log_probs"),
    "old_ref": ("log_probs", "ref_log_probs"),
}
Row = dict[str, Any]


def random_row(generator: random.Random, group: int) -> Row:
    length = generator.randint(1, 9)
    mask = [generator.choice([0, 1, 1]) for _ in range(length)]
    row: Row = {"prompt_ids": [1, 2, group + 10, 3], "loss_mask": mask, "group_index": group}
    row |= {"response_ids": [generator.randrange(4, 90) for _ in range(length)]}
    row |= {"reward": float(generator.randrange(3))}
    row["advantages"] = [generator.gauss(0, 1) for _ in range(length)]
    base = [-generator.expovariate(1.0) - 1 for _ in range(length)]
    for column in COLUMNS:
        values = [value + generator.uniform(-0.5, 0.5) for value in base]
        row[column] = [v if kept else None for v, kept in zip(values, mask, strict=True)]
    return row


def write_steps(
    folder: Path, num_steps: int, num_groups: int, without: str = ""
) -> list[list[Row]]:
    generator, steps = random.Random(3), []
    for step in range(num_steps):
        groups = range(step * num_groups, (step + 1) * num_groups)
        rows = [random_row(generator, group) for group in groups for _ in range(4)]
        for row in rows:
            for column in without.split():
                del row[column]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"step_{step:06d}.jsonl").write_text(text)
        steps.append(rows)
    return steps


def page_of(folder: Path, config: PolicyLossConfig = CONFIG, **options: Any) -> tuple[Row, str]:
    """The data of the page of a folder's rows, and the page."""
    path = folder.with_suffix(".html")
    write_rollout_page(path, RolloutFiles([folder]), config, title="a <title>", **options)
    page = path.read_text()
    data = page.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    return json.loads(data), page


def log_ratios(row: Row, name: str) -> list[float | None]:
    first, second = (row[column] for column in RATIOS[name])
    return [None if a is None else a - b for a, b in zip(first, second, strict=True)]


def clipped_tokens(row: Row) -> int:
    count = 0
    for log_ratio, advantage in zip(log_ratios(row, "new_old"), row["advantages"], strict=True):
        if log_ratio is not None:
            ratio = math.exp(log_ratio)
            count += ratio > 1.2 and advantage > 0 or ratio < 0.9 and advantage < 0
    return count


def test_the_page_has_the_numbers_of_every_token(tmp_path: Path) -> None:
    steps = write_steps(tmp_path, 3, 5)
    data, page = page_of(tmp_path)
    assert "<title>a &lt;title&gt;</title>" in page and "http" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )
    assert data["ratios"] == list(RATIOS) and data["kept_for"] is None
    assert data["clip"] == pytest.approx([math.log(0.9), math.log(1.2)])
    assert (data["entries"], data["skipped"], data["estimated"]) == (15, 0, 0)
    shown = [(group, response) for group in data["groups"] for response in group["a"]]
    rows = [(number, row) for number, step in enumerate(steps) for row in step]
    for (number, row), (group, response) in zip(rows, shown, strict=True):
        assert group["s"] == number and group["g"] == row["group_index"]
        assert group["p"] == row["prompt_ids"] and response["t"] == row["response_ids"]
        assert response["r"] == row["reward"]
        assert response.get("m", "1" * len(response["t"])) == "".join(map(str, row["loss_mask"]))
        advantages = response["a"] if isinstance(response["a"], list) else [response["a"]]
        assert advantages == pytest.approx(row["advantages"], abs=6e-5)
        for name in RATIOS if any(row["loss_mask"]) else ():
            for found, expected in zip(response[name], log_ratios(row, name), strict=True):
                assert (found is None) == (expected is None)
                assert found is None or found == pytest.approx(expected, abs=6e-5)


def test_the_numbers_of_a_step_are_of_all_its_responses(tmp_path: Path) -> None:
    steps = write_steps(tmp_path, 3, 5)
    for number, (found, rows) in enumerate(zip(page_of(tmp_path)[0]["steps"], steps, strict=True)):
        assert found["name"] == f"step {number}" and found["responses"] == 20
        assert found["reward"] == pytest.approx(
            statistics.fmean(r["reward"] for r in rows), abs=1e-4
        )
        lengths = [len(row["response_ids"]) for row in rows]
        assert found["length"] == pytest.approx(statistics.fmean(lengths), abs=0.01)
        ratios = [x for row in rows for x in log_ratios(row, "new_old") if x is not None]
        assert found["ratio"] == pytest.approx(max(map(abs, ratios)), abs=1e-4)
        share = sum(map(clipped_tokens, rows)) / len(ratios)
        assert found["clipped"] == pytest.approx(share, abs=1e-4) and share > 0


@pytest.mark.parametrize(
    "settings", [{"policy_loss": "cispo"}, {"policy_loss": "gspo"}, {"ratio_anchor": "rollout"}]
)
def test_a_loss_that_does_not_clip_this_ratio_has_no_clipped_tokens(tmp_path, settings):
    write_steps(tmp_path, 1, 2)
    data, _ = page_of(tmp_path, PolicyLossConfig(**settings))
    assert data["clip"] is None and data["steps"][0]["clipped"] is None


def worst_of(rows: list[Row]) -> dict[str, int]:
    """The prompt group of the worst row of each kind."""

    def largest(measure: Any) -> int:
        return max(rows, key=measure)["group_index"]

    def furthest(values: Any) -> float:
        return max((abs(value) for value in values if value is not None), default=-1.0)

    def advantages(row: Row) -> list[float]:
        return [a for a, kept in zip(row["advantages"], row["loss_mask"], strict=True) if kept]

    kinds = {
        f"largest |log-ratio| {n}": largest(lambda r, n=n: furthest(log_ratios(r, n)))
        for n in RATIOS
    }
    return kinds | {"largest |advantage|": largest(lambda row: furthest(advantages(row)))}


def test_of_many_the_worst_are_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for step in write_steps(tmp_path, 4, 60) for row in step]
    monkeypatch.setattr(rollout_page, "PAGE_BYTES", 60_000)
    data, page = page_of(tmp_path)
    groups = {
        group["g"]: kinds for group, kinds in zip(data["groups"], data["kept_for"], strict=True)
    }
    assert len(page.split("groups")[1]) < 70_000 and 20 < len(groups) < data["entries"] == 240
    for kind, group in worst_of(rows).items():
        assert kind in [data["kinds"][number] for number in groups[group]], kind
    assert max(len(row["response_ids"]) for row in rows) in {
        len(a["t"]) for g in data["groups"] for a in g["a"]
    }
    assert any(data["kinds"][number] == AT_RANDOM for kinds in groups.values() for number in kinds)
    # Whole groups, and the numbers by step of all rows.
    assert all(len(group["a"]) == 4 for group in data["groups"])
    assert [step["responses"] for step in data["steps"]] == [240] * 4
    # Those that are kept for nothing but chance are of all steps.
    by_chance = {
        g["s"] for g, kinds in zip(data["groups"], data["kept_for"], strict=True) if kinds == [0]
    }
    assert by_chance == {0, 1, 2, 3}


def test_an_entry_that_is_too_long_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses to one prompt, which alone would be more than the page may have."""
    write_steps(tmp_path, 1, 1)
    monkeypatch.setattr(rollout_page, "PART_BYTES", 10)
    data, _ = page_of(tmp_path)
    assert [len(group["a"]) for group in data["groups"]] == [1] * 4


@pytest.mark.parametrize(
    ("without", "expected"), [("advantages", "grpo"), ("advantages group_index", None)]
)
def test_advantages_are_made_of_rewards_where_a_prompt_group_is_known(tmp_path, without, expected):
    (rows,) = write_steps(tmp_path, 1, 3, without)
    data, _ = page_of(tmp_path)
    assert data["estimated"] == (12 if expected else 0)
    shown = [response.get("a") for group in data["groups"] for response in group["a"]]
    if expected is None:
        assert shown == [None] * 12 and len(data["groups"]) == 12
        return
    for start in (0, 4, 8):
        rewards = [row["reward"] for row in rows[start : start + 4]]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        assert shown[start : start + 4] == pytest.approx(
            [(r - mean) / (deviation + 1e-6) for r in rewards], abs=1e-3
        )


def test_a_rollout_of_several_rows_counts_once(tmp_path: Path) -> None:
    """Rewards 1 (three rows), 0 and 0.5."""
    generator = random.Random(3)
    rollouts = ((1.0, 7), (1.0, 7), (1.0, 7), (0.0, 8), (0.5, None))
    rows = [random_row(generator, 0) | {"reward": r, "rollout_id": i} for r, i in rollouts]
    for row in rows:
        del row["advantages"]

    def page() -> Row:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "step_000000.jsonl").write_text(text)
        return page_of(tmp_path)[0]

    data = page()
    found = [response["a"] for response in data["groups"][0]["a"]]
    assert found == pytest.approx([1.0, 1.0, 1.0, -1.0, 0.0], abs=1e-4)
    (step,) = data["steps"]
    assert step["reward"] == 0.5 and (step["responses"], data["estimated"]) == (5, 5)
    rows[1]["reward"] = 0.25
    with pytest.raises(ValueError, match=r"rollout_id 7 has the rewards 1.0 \(.* row 0\) and 0.25"):
        page()
    rows[1] |= {"reward": 1.0, "advantages": 0.5}
    with pytest.raises(ValueError, match="row 1 has advantages and .* row 0 only a reward"):
        page()


def test_versions_of_the_policy_are_steps(tmp_path: Path) -> None:
    (rows,) = write_steps(tmp_path, 1, 4)
    lines = [json.dumps(row | {"policy_version": row["group_index"] // 2}) + "\n" for row in rows]
    (tmp_path / "step_000000.jsonl").write_text("".join(lines))
    assert [s["name"] for s in page_of(tmp_path)[0]["steps"]] == [
        "policy version 0",
        "policy version 1",
    ]


def test_texts_of_tokens_cannot_end_the_script(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    texts = tmp_path.with_suffix(".json")
    texts.write_text(json.dumps({token: f"</script><!--{token}" for token in range(100)}))
    data, page = page_of(tmp_path, tokenizer=texts)
    assert data["texts"]["2"] == "</script><!--2" and page.count("</script>") == 2
    used = {i for g in data["groups"] for i in [*g["p"], *(t for a in g["a"] for t in a["t"])]}
    assert set(map(int, data["texts"])) == used


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lengths 3 --html {out}", "requires --rollout-files. Add it"),
        ("--rollout-files {folder} --tokenizer x", "has no effect without --html"),
        (
            "--rollout-files {folder} --html {out} --tokenizer {folder}/step_000000.jsonl",
            "expected a JSON object of texts",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, capsys, flags, message):
    write_steps(tmp_path, 1, 2)
    line = flags.format(folder=tmp_path, out=tmp_path.with_suffix(".html"))
    assert explain(line.split()) == 2 and message in capsys.readouterr().err


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 2, 2)
    out = tmp_path.with_suffix(".html")
    assert explain(["--rollout-files", str(tmp_path), "--html", str(out)]) == 0
    assert "sample_mean" in capsys.readouterr().out and f"Rollouts of {tmp_path}" in out.read_text()


def test_a_row_of_the_new_policy_is_checked(tmp_path: Path) -> None:
    (rows,) = write_steps(tmp_path, 1, 1)
    rows[1]["new_log_probs"] = rows[1]["new_log_probs"][:-1]
    (tmp_path / "step_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="row 1: new_log_probs"):
        page_of(tmp_path)
