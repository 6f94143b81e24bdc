"""Plans: sizes against a real export, the example pair of the docs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.engines.errors import SourceError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.cli import main
from specrt.tools.plan.plan import acceptance_from_file, make_plan
from specrt.tools.plan.roofline import device_table
from specrt.tools.plan.sizes import Shape, cost_of

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def test_sizes_are_those_of_the_exported_bundle(tiny_bundle: Path) -> None:
    """Except for the rotation's tables, cos and sin [capacity, head_dim / 2] f32, which are no parameters."""
    entry = manifest_from_bundle(tiny_bundle).target
    cost = cost_of(entry.source, Shape("fp32", "none", entry.spec.max_seq_len, 4))
    tables_bytes = entry.spec.capacity * entry.spec.kv_layers[0].head_dim * 4
    assert 0 <= entry.weights_bytes - cost.weights_bytes <= tables_bytes
    assert abs(entry.bytes_per_pass - cost.bytes_per_pass) <= tables_bytes
    assert cost.kv_bytes == entry.spec.kv_bytes


def test_a_config_file_is_enough() -> None:
    cost = cost_of(str(EXAMPLES / "llama-3-8b.json"), Shape("fp16", "none", 8192, 8))
    assert cost.weights_bytes == pytest.approx(8.03e9 * 2, rel=0.001)
    assert cost.bytes_per_pass == cost.weights_bytes - 128256 * 4096 * 2
    assert cost.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    smaller = cost_of(str(EXAMPLES / "llama-3-8b.json"), Shape("fp16", "int4", 8192, 8))
    assert 0.28 < smaller.weights_bytes / cost.weights_bytes < 0.36


def test_sizes_of_integers_for_tensorrt() -> None:
    """int4 in blocks of 32 with fp16 scales, tables by row in 8 bits; w8a8 is not for it."""
    path = str(EXAMPLES / "llama-3-8b.json")
    plain, int4, int8 = (cost_of(path, Shape("fp16", name, 8192, 8)) for name in ("none", "int4", "int8"))
    tables = 2 * 128256 * 4096
    inner = plain.weights_bytes // 2 - tables
    assert int4.weights_bytes == int(inner * 0.5625) + tables
    assert int8.weights_bytes * 2 == plain.weights_bytes
    with pytest.raises(UsageError, match="--quantize w8a8: expected none, int8, int4 with --dtype fp16"):
        cost_of(path, Shape("fp16", "w8a8", 8192, 8))


def test_the_example_of_the_docs() -> None:
    table = device_table()
    target, draft = (
        cost_of(str(EXAMPLES / f"llama-3-{size}.json"), Shape("fp16", "int4", 4096, 16)) for size in ("70b", "8b")
    )
    fits = {name: make_plan(device, target, draft, None, (0.8,)).fits for name, device in table.items()}
    assert fits["a100-80gb"] and fits["agx-orin-64gb"] and not fits["rtx-5090"]
    plan = make_plan(table["a100-80gb"], target, draft, None, (0.8,))
    best = plan.rounds.best_k((0.8,))
    assert 3 <= best <= 8
    assert 1.5 < plan.rounds.speedup((0.8,), best) < 3
    assert set(plan.as_dict()["speedup_by_k"]) == {1, 2, 3, 4, 5, 6, 8, 12, 16}


@pytest.mark.parametrize("past", [-1, 4097])
def test_the_past_must_fit(past: int) -> None:
    cost = cost_of(str(EXAMPLES / "llama-3-8b.json"), Shape("fp16", "none", 4096, 16))
    with pytest.raises(UsageError, match="--past: got"):
        make_plan(device_table()["l4"], cost, None, past, (0.8,))
    with pytest.raises(UsageError, match="--acceptance: got"):
        make_plan(device_table()["l4"], cost, None, 1, (1.8,))


def test_shapes_are_checked() -> None:
    name = str(EXAMPLES / "llama-3-8b.json")
    with pytest.raises(UsageError, match="--dtype fp8"):
        Shape("fp8", "none", 10, 1)
    with pytest.raises(UsageError, match="--quantize int2"):
        cost_of(name, Shape("fp16", "int2", 10, 1))
    assert cost_of(name, Shape("fp16", "none", 9000, 1)).max_seq_len == 8192
    with pytest.raises(SourceError, match="no such file"):
        cost_of("none/config.json", Shape("fp16", "none", 10, 1))


def test_acceptance_comes_from_align_or_bench(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"acceptance_by_position": [0.9, 0.8]}))
    assert acceptance_from_file(file) == (0.9, 0.8)
    rows = [{"acceptance_by_position": [0.5]}, {"acceptance_by_position": [0.7]}, {"acceptance_by_position": []}]
    file.write_text(json.dumps({"scores": rows}))
    assert acceptance_from_file(file) == (0.7,)
    named = [
        {"method": "model", "acceptance_by_position": [0.6]},
        {"method": "ngram", "acceptance_by_position": [0.5]},
        *rows,
    ]
    file.write_text(json.dumps({"scores": named}))
    assert (acceptance_from_file(file), acceptance_from_file(file, False)) == ((0.6,), (0.5,))
    for content in ("{}", "[]", "x", '{"acceptance_by_position": "no"}'):
        file.write_text(content)
        with pytest.raises(UsageError, match="no acceptance_by_position in it"):
            acceptance_from_file(file)


def test_from_a_bench_that_was_run(tiny_bundle: Path, bench_file: Path) -> None:
    """Bench, then plan the same pair with what was accepted: the tiny target drafts for itself, so all of it."""
    scores = {row["method"]: row for row in json.loads(bench_file.read_text())["scores"]}
    source = manifest_from_bundle(tiny_bundle).target.source
    for draft, method in ((source, "model"), ("ngram", "ngram")):
        measured = scores[method]["acceptance_by_position"]
        options = ["--draft", draft, "--device", "l4", "--max-seq-len", "512", "--from", str(bench_file), "--json"]
        run = CliRunner().invoke(main, ["plan", source, *options], standalone_mode=False)
        if not measured:  # n-grams found nothing to draft in so short a text
            assert "no acceptance_by_position" not in run.output
            continue
        made = json.loads(run.stdout)
        assert made["acceptance"] == measured
        tokens, reached = 1.0, 1.0
        for place in range(2):
            reached *= measured[min(place, len(measured) - 1)]
            tokens += reached
        step, pass_3, plain = (made["pass_ms"][Path(source).name][w] for w in ("1", "2", "1"))
        assert made["speedup_by_k"]["1"] == pytest.approx(
            (1 + measured[0]) * plain / (pass_3 + (draft != "ngram") * step)
        )
        assert tokens >= 1 + measured[0]
    assert scores["model"]["acceptance_by_position"] == [1.0] * 4


def test_the_command() -> None:
    name = str(EXAMPLES / "llama-3-8b.json")
    run = CliRunner().invoke(main, ["plan", name, "--device", "l4", "--json"], standalone_mode=False)
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["fits"] is True
    shown = CliRunner().invoke(main, ["plan", name, "--device", "orin-nx-16gb"], standalone_mode=False).stdout
    assert "nvidia-jetson-agx-orin-technical-brief.pdf; not checked)" in shown.replace("\n", "")
    for wrong, message in (
        ([], "got no --device"),
        (["--device", "l4", "--tflops", "1"], "give one or the other"),
        (["--bandwidth", "1"], "got no --device"),
        (["--device", "l4", "--max-seq-len", "9000"], "expected at most 8192, the context of"),
    ):
        run = CliRunner().invoke(main, ["plan", name, *wrong])
        assert (run.exit_code, message in run.output) == (2, True), run.output
