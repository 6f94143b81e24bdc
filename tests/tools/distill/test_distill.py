"""``specrt distill`` on a tiny target: by torch and by a quantized bundle, verdicts, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from specrt.engines.errors import ParityError, ResourceError, UsageError
from specrt.engines.interface import Memory
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.progress import Silent
from specrt.exporter.heads.files import head_from_folder
from specrt.exporter.training.loading import load_target
from specrt.exporter.training.prompts import own_prompts
from specrt.exporter.training.store import Store
from specrt.tools.cli import main
from specrt.tools.distill.bundle_text import BundleWriter, FeatureLog, compare_logits, export_with_features
from specrt.tools.distill.distill import _claimed, _train, distill, recipes
from specrt.tools.distill.options import DistillOptions
from specrt.tools.distill.source import source_of
from specrt.tools.distill.verdict import verdict_of
from tests.exporter.training.tiny_training import SIZES, TAPS, learnable_model, small_text
from tests.exports import Exports
from tests.tiny import tiny_llama_config, tiny_tokenizer


@pytest.fixture(scope="session")
def learnable(exports: Exports) -> Path:
    from tests.exports import made_once

    def make(folder: Path) -> None:
        learnable_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    return made_once(exports.folder / "learnable" / "model", make)


def test_a_head_is_written_with_its_record(learnable: Path, tmp_path: Path) -> None:
    """In speculators' layout; time and disk are said before the text is written."""

    class Notes(Silent):
        def note(self, line: str) -> None:
            notes.append(line)

    notes: list[str] = []
    options = DistillOptions(str(learnable), tmp_path / "head", tokens=2500, threads=1)
    _train(options, source_of(options.source), options.work_folder, Notes())
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["text"]["num_tokens"] >= 2500 and record["draft_vocab"]["coverage"] > 0.5
    assert len(record["history"]) >= 2 and record["best"] in record["history"]
    assert "<svg" in (tmp_path / "head" / "training.svg").read_text()
    loaded = head_from_folder(tmp_path / "head", 7, 32, 320)
    assert loaded.layout == "speculators" and loaded.config.variant.fc_norm == "each"
    assert notes[0].startswith("text: about 2500 tokens in ") and "MB of hidden states in" in notes[0]
    assert any(line.startswith("draft vocabulary: ") for line in notes)


@pytest.mark.slow
def test_the_command_trains_writes_exports_and_judges(exports: Exports, learnable: Path, tmp_path: Path) -> None:
    """It leaves only the head and the pair, of which an older one is replaced with --force, and not without."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the dog\nan area\nbirds sing\n")
    arguments = ["distill", str(learnable), "-o", str(tmp_path / "head"), "--tokens", "2500", "--threads", "1"]
    arguments += ["--prompts", str(prompts), "--bundle", str(tmp_path / "pair")]
    shutil.copytree(exports.bundle(learnable), tmp_path / "pair")
    found = CliRunner().invoke(main, [*arguments, "--force"])
    assert found.exit_code == 0, found.output
    assert "use on this machine: " in found.stdout and "ngram" in found.stdout
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert set(record["verdict"]["alignments"]) == {"head", "ngram", "self:int4"}
    assert not (tmp_path / "head.training").exists()
    pair = manifest_from_bundle(tmp_path / "pair")
    assert pair.draft.model is not None and pair.draft.model.spec.reads_features
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2 and "exists already; pass --force" in again.stderr


@pytest.mark.slow
def test_a_quantized_bundle_writes_the_text_with_its_own_hidden_states(
    exports: Exports, learnable: Path, tmp_path: Path
) -> None:
    """What is stored is what one pass of the graph over the whole text gives, and greedy text is the runtime's."""
    given = exports.bundle(learnable, quantize="int8")
    source = source_of(str(given))
    target = load_target(source.options(tmp_path), TAPS)
    export_with_features(target, source, tmp_path / "text")
    recipe = small_text(300)
    store = Store(tmp_path / "store", target.hidden_size)
    outlines = own_prompts(target.tokenizer, target.eos_ids, recipe)
    with BundleWriter(tmp_path / "text", target, outlines, recipe, 1) as writer:
        writer.write(store)
        for entry in store.entries[:4]:
            rows = store.rows(entry)
            model = writer._slot.target.model
            model.rollback(0)
            writer._log.rows[:] = 0
            model.prefill(rows.ids.tolist())
            features = writer._log.rows[: len(rows.ids)]
            width = 3 * target.hidden_size
            np.testing.assert_allclose(rows.taps, features[:, :width], rtol=1e-2, atol=1e-2)
            with torch.no_grad():
                last = target.final_norm(torch.from_numpy(features[:, width:]))
            np.testing.assert_allclose(rows.last, last, rtol=1e-2, atol=1e-2)
            if outlines(entry.number).temperature == 0:
                written = rows.ids[rows.first_scored :]
                assert (written == rows.top[rows.first_scored - 1 : -1]).mean() > 0.9  # by lm_head in fp32


class StoppedLog(FeatureLog):
    """Sends Ctrl-C to this process once, in a pass in the middle of an answer."""

    is_sent = False

    def take_features(self, start: int, features: Memory) -> None:
        super().take_features(start, features)
        if start >= 30 and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_keeps_the_answer_that_the_runtime_writes(learnable: Path, tmp_path: Path) -> None:
    """It is the beginning of the one that an undisturbed run writes, and the next run goes on from there."""
    source = source_of(str(learnable))
    target = load_target(source.options(tmp_path), TAPS)
    export_with_features(target, source, tmp_path / "bundle")
    recipe = small_text(300)
    whole, store = (Store(tmp_path / name, target.hidden_size) for name in ("whole", "stopped"))
    outlines = own_prompts(target.tokenizer, target.eos_ids, recipe)
    with BundleWriter(tmp_path / "bundle", target, outlines, recipe, 1) as writer:
        writer.write(whole)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with BundleWriter(tmp_path / "bundle", target, outlines, recipe, 1) as writer:
            writer._log = writer._slot.target.model.feature_reader = StoppedLog(writer._runtime.manifest.target.spec)
            with pytest.raises(KeyboardInterrupt):
                writer.write(store)
            stopped = store.entries[-1]
            writer.write(store)
    finally:
        signal.signal(signal.SIGINT, before)
    full = next(entry for entry in whole.entries if entry.number == stopped.number)
    assert stopped.num_tokens < full.num_tokens
    rows, expected = store.rows(stopped), whole.rows(full)
    assert (rows.ids == expected.ids[: len(rows.ids)]).all() and rows.first_scored == expected.first_scored
    np.testing.assert_allclose(rows.taps, expected.taps[: len(rows.ids)], rtol=1e-2, atol=1e-2)
    numbers = [entry.number for entry in store.entries]
    assert len(set(numbers)) == len(numbers) and store.num_tokens >= 300


@pytest.mark.slow
def test_a_command_that_ctrl_c_stopped_continues(learnable: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "specrt.tools.cli", "distill", str(learnable), "-o", str(tmp_path / "head")]
    arguments += ["--tokens", "30000", "--threads", "1", "--keep-data"]
    index = tmp_path / "head.training" / "text" / "index.jsonl"
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    num_finished = 0
    while time.monotonic() < deadline and process.poll() is None and num_finished < 40:
        num_finished = len(index.read_text().splitlines()) if index.exists() else 0
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "specrt: interrupted" in errors and "Traceback" not in errors, errors
    kept = index.read_text()
    assert len(kept.splitlines()) >= num_finished + 5, "answers of some of the 30 lanes"
    found = subprocess.run(arguments, capture_output=True, text=True)
    assert found.returncode == 0 and "use on this machine: " in found.stdout, found.stderr
    assert index.read_text().startswith(kept) and "text: about" in found.stderr
    written = index.read_text()
    found = subprocess.run(arguments, capture_output=True, text=True)
    assert found.returncode == 0 and "text: about" not in found.stderr, "its speed is not measured again"
    assert index.read_text() == written
    assert json.loads((tmp_path / "head" / "training.json").read_text())["text"]["num_tokens"] >= 30000


def test_a_context_without_room_for_the_verdict_is_refused(exports: Exports, learnable: Path, tmp_path: Path) -> None:
    """Before any text is written, and not after the training."""
    bundle = exports.bundle(learnable, max_seq_len=64)
    arguments = ["distill", str(bundle), "-o", str(tmp_path / "head"), "--tokens", "100", "--threads", "1"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2 and "its context is 64 tokens, expected " in found.stderr
    assert list(tmp_path.iterdir()) == [], "corrected options are not refused"


@pytest.mark.slow
def test_a_bundle_whose_source_changed_is_refused(exports: Exports, learnable: Path, tmp_path: Path) -> None:
    """The reason is the source where its fingerprint differs, and the exporter where it does not."""
    given = exports.bundle(learnable, quantize="int8")
    other = exports.bundle(exports.model(tiny_llama_config(**SIZES, num_hidden_layers=7)))
    with pytest.raises(ParityError, match=r"its logits differ by .* since the source changed; export the bundle again"):
        compare_logits(given, other)
    with pytest.raises(ParityError, match=r"its logits differ by .* since the exporter changed"):
        compare_logits(given, exports.bundle(learnable, quantize="int4"))


def test_a_bundle_of_tensorrt_is_refused(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    arguments = ["distill", str(tiny_tensorrt_bundle), "-o", str(tmp_path / "head"), "--tokens", "100"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2 and "expected one for onnxruntime, which writes the text; give " in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--kind", "layers", "--num-layers", "7"], 2, "--num-layers 7: expected 1 to 6 of the target's layers"),
        (["--num-layers", "0"], 2, "--num-layers 0: expected 1 or more"),
        (["--max-draft-vocab", "0"], 2, "--max-draft-vocab 0: expected 1 or more"),
        (["--minutes", "inf"], 2, "--minutes: got inf for the text, expected a finite number above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_text(
    options: list[str], code: int, message: str, learnable: Path, tmp_path: Path
) -> None:
    arguments = ["distill", str(learnable), "-o", str(tmp_path / "head"), "--threads", "1", *options]
    found = CliRunner().invoke(main, arguments if "--minutes" in options else [*arguments, "--tokens", "100"])
    assert found.exit_code == code and message in found.stderr, found.stderr
    assert list(tmp_path.iterdir()) == [], "corrected options are not refused"


@pytest.mark.slow
def test_layers_become_a_model_of_their_own(learnable: Path, tmp_path: Path) -> None:
    arguments = ["distill", str(learnable), "-o", str(tmp_path / "small"), "--kind", "layers", "--num-layers", "2"]
    found = CliRunner().invoke(main, [*arguments, "--tokens", "2000", "--threads", "1"])
    assert found.exit_code == 0, found.output
    assert "use on this machine: " in found.stdout
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and (tmp_path / "small" / "tokenizer.json").is_file()


def test_verdicts() -> None:
    assert verdict_of("head", {"head": 1.4, "ngram": 1.2}).startswith("use on this machine: 1.40 times plain")
    assert verdict_of("head", {"head": 1.4, "ngram": 1.5}) == (
        "do not use on this machine: 1.40 times plain decoding, ngram gives 1.50"
    )
    assert verdict_of("head", {"head": 1.02, "ngram": 1.0}).startswith("do not use on this machine: 1.02 times plain")


def test_the_time_is_divided_and_said_once(tmp_path: Path) -> None:
    options = DistillOptions("x", tmp_path / "head", minutes=30.0)
    text, train = recipes(options)
    assert text.minutes == pytest.approx(12.6) and train.minutes == pytest.approx(17.4)
    text, train = recipes(replace(options, minutes=None, tokens=10_240))
    assert (text.num_tokens, text.num_lanes, train.num_steps) == (10_240, 10, 20)
    with pytest.raises(UsageError, match=r"got --tokens 5 too; give one of them"):
        replace(options, tokens=5)


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    options = DistillOptions("nothing that exists", tmp_path / "head", tokens=100)
    with _claimed(options), pytest.raises(ResourceError, match=r"head.training: another process trains in it"):
        distill(options)
    with _claimed(options) as folder:  # free again
        assert folder == options.work_folder


def test_torch_does_not_write_for_a_quantized_bundle(exports: Exports, learnable: Path, tmp_path: Path) -> None:
    bundle = exports.bundle(learnable, quantize="int8")
    assert source_of(str(bundle)).quantization == "int8"
    arguments = ["distill", str(bundle), "-o", str(tmp_path / "head"), "--tokens", "100", "--writer", "torch"]
    found = CliRunner().invoke(main, [*arguments, "--threads", "1"])
    assert found.exit_code == 2 and "--writer torch: the target is quantized" in found.stderr


def test_too_few_layers_for_a_head(exports: Exports, tmp_path: Path) -> None:
    arguments = ["distill", str(exports.model()), "-o", str(tmp_path / "head"), "--tokens", "100", "--threads", "1"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 4 and "has 2 layers, expected 5 or more for a head" in found.stderr
