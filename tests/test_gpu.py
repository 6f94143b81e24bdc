"""The real thing, where there is an NVIDIA GPU: the experiments of ``specrt gpu-check`` on their kit, and SmolLM2 as
TensorRT engines and on ONNX Runtime's CUDA provider.

Skipped elsewhere. What a GPU computes is compared with the CPU: logits within the dtype's rounding, and ids but for
near ties. What must be equal to the last bit on one device is compared on that device.
"""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from specrt.engines.contract import LOGITS, model_contract
from specrt.engines.errors import SpecrtError
from specrt.engines.gpu.device import open_device
from specrt.engines.interface import Array, Binding, write_pass
from specrt.engines.manifest import LOGITS_TOLERANCE, manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.trt.build import build
from specrt.engines.trt.engine import TrtBackend
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.tools.doctor import examine
from specrt.tools.gpu_check.check import Report, gpu_check
from specrt.tools.gpu_check.experiment import PASSED, SKIPPED
from specrt.tools.gpu_check.make import make_kit
from specrt.tools.gpu_check.table import EXPERIMENTS
from specrt.tools.lab.gpu_rounds import measure
from specrt.tools.lab.models import fetch
from specrt.tools.rounds import run_rounds
from specrt.tools.verify.certificate import certify

pytestmark = [pytest.mark.gpu, pytest.mark.model]

K, NUM_TOKENS = 5, 48
PROMPT = "def fibonacci(n):\n    if n"
NEAR_TIE = 0.05  # of a logit's unit: fp16 rounds by about so much at 20
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"draft": "model"},
    "ngram": {"draft": "ngram"},
    "seed": {"draft": "model", "temperature": 0.8, "seed": 3},
    "filters": {"draft": "model", "temperature": 0.8, "top_p": 0.9, "seed": 4},
}


def gguf() -> str:
    try:
        return str(fetch("smollm2-135m"))
    except SpecrtError as error:
        pytest.skip(f"SmolLM2-135M cannot be fetched here: {error}")


def exported(folder: Path, backend: str) -> Path:
    options = ExportOptions(gguf(), folder, "self", K, max_seq_len=512, backend=backend, dtype="fp16")
    export(options)
    return folder


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("standard") / "bundle", "tensorrt-rtx")


@pytest.fixture(scope="module", params=["tensorrt-rtx", "tensorrt"])
def built(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The bundle with engines for this GPU, and the backend."""
    module = request.param.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the library {module} is not installed")
    bundle = Path(shutil.copytree(standard, tmp_path_factory.mktemp("built") / "bundle"))
    build(bundle, request.param)
    return bundle, request.param


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for ONNX Runtime in fp16, for CUDA."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDAExecutionProvider")
    return exported(tmp_path_factory.mktemp("half") / "bundle", "onnxruntime")


def logits_of(binding: Binding, ids: Array, widths: list[int]) -> Array:
    rows, start = [], 0
    for width in widths:
        write_pass(binding.host, ids[start : start + width], start, width)
        binding.upload()
        binding.run(width, width)
        rows.append(binding.read(LOGITS)[0][:width].copy())
        start += width
    return np.concatenate(rows)


def test_an_engine_gives_the_logits_of_its_graph(built: tuple[Path, str]) -> None:
    """Passes of any width on a growing cache, against ONNX Runtime's CPU provider on the same graph."""
    bundle, backend = built
    entry = manifest_from_bundle(bundle).target
    ids, contract = np.load(bundle / entry.reference)["ids"], model_contract(entry.spec)
    widths = [1, K + 1, 2, 3, 1, K + 1, 4]
    expected = logits_of(OrtEngine(bundle / entry.graph, contract, threads=4).open(), ids, widths)
    found = logits_of(TrtBackend(backend, bundle).load(entry.graph, contract).open(), ids, widths)
    assert np.abs(found - expected).max() / np.abs(expected).max() <= LOGITS_TOLERANCE["float16"]
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.95


def generated(runtime: Runtime, **way: Any) -> list[int]:
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "reproducible": True, **way}
    if way.get("draft") != "none":
        options["num_speculative_tokens"] = K
    return runtime.generate(PROMPT, **options).token_ids


def check_ids(runtime: Runtime, expected: list[int]) -> None:
    """Speculation changes no id; plain greedy ids are the CPU's up to a near tie."""
    plain = generated(runtime, draft="none")
    for name in ("greedy", "ngram"):
        assert generated(runtime, **WAYS[name]) == plain, name
    for name in ("seed", "filters"):
        alone = {**WAYS[name], "draft": "none"}
        assert generated(runtime, **WAYS[name]) == generated(runtime, **alone), name
    fork = next((i for i, pair in enumerate(zip(plain, expected, strict=True)) if pair[0] != pair[1]), None)
    if fork is not None:
        slot = runtime.open_slot("none")
        slot.target.model.feed([*runtime.codec.encode(PROMPT), *plain[:fork]], 1)
        logits = slot.target.model.read(LOGITS)[0][0]
        slot.close()
        assert abs(logits[plain[fork]] - logits[expected[fork]]) <= NEAR_TIE, f"ids fork at {fork}, not at a near tie"


def test_ids_of_engines(built: tuple[Path, str], tmp_path: Path) -> None:
    bundle, backend = built
    with specrt.load(exported(tmp_path / "cpu", "onnxruntime")) as runtime:
        expected = generated(runtime, draft="none")
    with specrt.load(bundle, backend=backend) as runtime:
        check_ids(runtime, expected)


def test_ids_of_onnxruntime_on_cuda(half: Path) -> None:
    with specrt.load(half) as runtime:
        expected = generated(runtime, draft="none")
    with specrt.load(half, device="cuda") as runtime:
        check_ids(runtime, expected)
    with specrt.load(half, device="cuda", draft_device="cpu") as runtime:
        assert generated(runtime, **WAYS["greedy"]) == generated(runtime, draft="none")


def test_graphs_change_nothing(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, backend = built
    found = []
    for uses_graphs in (True, False):
        monkeypatch.setattr(TrtBackend, "uses_graphs", uses_graphs)
        with specrt.load(bundle, backend=backend) as runtime:
            found.append({name: generated(runtime, **way) for name, way in WAYS.items()})
    assert found[0] == found[1]


def test_passes_allocate_nothing(built: tuple[Path, str]) -> None:
    """Passes that would are announced by a warning, and so are those that cannot be captured."""
    bundle, backend = built
    with warnings.catch_warnings(), specrt.load(bundle, backend=backend) as runtime:
        warnings.simplefilter("error")
        for _ in range(2):
            generated(runtime, **WAYS["seed"])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each time that the host waits."""
    device, noted = open_device(), []
    wait = device.api.wait

    def counted() -> None:
        noted.append(1)
        wait()

    monkeypatch.setattr(device.api, "wait", counted)
    return noted  # type: ignore[return-value]


@pytest.mark.parametrize("name", list(WAYS))
def test_the_host_waits_once_a_round(built: tuple[Path, str], waits: list[int], name: str) -> None:
    bundle, backend = built
    with specrt.load(bundle, backend=backend) as runtime:
        given: Any = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "num_speculative_tokens": K, **WAYS[name]}
        settings, slot = settings_of(options_of(given), runtime.manifest), runtime.open_slot("model")
        marks: list[int] = []
        run_rounds(runtime, slot, runtime.codec.encode(PROMPT), settings, lambda *_: marks.append(len(waits)))
        slot.close()
    assert np.diff(marks[3:]).tolist() == [1] * (len(marks) - 4)


def test_block_runs(built: tuple[Path, str]) -> None:
    """The same seed, draft and K: the same ids, twice."""
    bundle, backend = built
    with specrt.load(bundle, backend=backend) as runtime:
        way = {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "block"}
        assert generated(runtime, **way) == generated(runtime, **way)


def test_verify_passes_on_engines(built: tuple[Path, str], tmp_path: Path) -> None:
    bundle, backend = built
    certificate = certify(bundle, {"backend": backend}, num_draws=2000, output=tmp_path / "certificate.json")
    assert [check.name for check in certificate.checks if not check.passed] == []


def test_verify_passes_on_onnxruntime_with_cuda(half: Path, tmp_path: Path) -> None:
    certificate = certify(half, {"device": "cuda"}, num_draws=2000, output=tmp_path / "certificate.json")
    assert [check.name for check in certificate.checks if not check.passed] == []


def test_doctor_reports_what_runs(built: tuple[Path, str]) -> None:
    found = {ability.name: ability for ability in examine().abilities}
    assert found[f"run with {built[1]}"].possible, found[f"run with {built[1]}"]


def test_an_engine_for_another_generation_is_refused(standard: Path, tmp_path: Path) -> None:
    """Built for compute capability 7.5 alone, on a GPU that has another."""
    capability = open_device().api.compute_capability
    if importlib.util.find_spec("tensorrt_rtx") is None or capability == "7.5":
        pytest.skip("needs tensorrt-rtx, and a GPU of another compute capability than 7.5")
    bundle = Path(shutil.copytree(standard, tmp_path / "bundle"))
    build(bundle, "tensorrt-rtx", ["7.5"])
    with pytest.raises(SpecrtError, match=f"for compute capability 7.5, this GPU has {capability}"):
        specrt.load(bundle, backend="tensorrt-rtx")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The experiments of ``specrt gpu-check`` on their own kit, made here."""
    return gpu_check(make_kit(tmp_path_factory.mktemp("kit") / "gpu-kit.tar.gz"))


@pytest.mark.parametrize("name", [experiment.name for experiment in EXPERIMENTS])
def test_experiments_of_gpu_check(checked: Report, name: str) -> None:
    outcome = next(outcome for outcome in checked.outcomes if outcome.name == name)
    if outcome.verdict == SKIPPED:
        pytest.skip(outcome.reason)
    assert (outcome.verdict, outcome.reason) == (PASSED, "")


def test_rounds_are_measured(built: tuple[Path, str]) -> None:
    """The tool that the documents' figures come from."""
    result = measure(built[0], {"backend": built[1]}, 32)
    assert result["device"] == "cuda"
    assert all(way["round_ms"] >= way["host_ms"] > 0 for way in result["ways"])
