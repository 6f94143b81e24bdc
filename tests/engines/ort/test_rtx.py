"""Backend onnxruntime-rtx without a GPU: what is refused, what is registered, and the options of a session."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as real_ort
import pytest

import specrt
from specrt.engines.contract import LOGITS, model_contract
from specrt.engines.errors import BackendError
from specrt.engines.gpu import device
from specrt.engines.gpu.device import Device
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort import cuda, rtx
from specrt.engines.ort.cpu import OrtBinding
from tests.engines.gpu.simulated_cuda import SimulatedCuda
from tests.engines.ort.simulated_ort import CPU, CUDA, SimulatedOrt, SimulatedSession
from tests.exports import Exports
from tests.tools.commands import invoke, one_error_line

K = 3
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


@pytest.fixture(scope="module")
def half(exports: Exports) -> Path:
    return exports.bundle(exports.model(), "self", K, max_seq_len=96, prefill_chunk=32, dtype="fp16")


class SimulatedRtx(SimulatedOrt):
    """ONNX Runtime with the plugin, whose device is the real library's CPU: sessions take real options."""

    def __init__(self, gpu: SimulatedCuda, has_device: bool = True) -> None:
        super().__init__(gpu)
        self.registered: list[tuple[str, str]] = []
        self.has_device = has_device

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.registered.append((name, path))

    def get_ep_devices(self) -> list[Any]:
        return real_ort.get_ep_devices() if self.has_device else [SimpleNamespace(ep_name="OtherExecutionProvider")]

    def InferenceSession(self, graph: Any, options: Any, providers: list[Any] | None = None) -> Any:
        assert providers is None, "the provider is in the options"
        assert options.has_providers(), "added for a device"
        is_strict = options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
        named = (CUDA, {"user_compute_stream": str(self.cuda.stream)})
        self.sessions.append(SimulatedSession(self, graph, options, [named] if is_strict else [named, CPU]))
        return self.sessions[-1]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedRtx:
    """The plugin, registered by the path in the environment, on a simulated GPU."""
    gpu = SimulatedCuda()
    opened, module = Device(gpu), SimulatedRtx(gpu)
    (tmp_path / "provider.so").write_bytes(b"ELF")
    monkeypatch.setenv(rtx.LIBRARY_VARIABLE, str(tmp_path / "provider.so"))
    monkeypatch.setattr(rtx, "ort", module)
    monkeypatch.setattr(rtx, "PROVIDER", CPU)
    monkeypatch.setattr(rtx, "find_devices", functools.cache(rtx.find_devices.__wrapped__))
    for place in (device, cuda):
        monkeypatch.setattr(place, "open_device", lambda ordinal=0: opened)
    return module


def refusal(half: Path) -> str:
    with pytest.raises(BackendError) as error:
        specrt.load(half, backend="onnxruntime-rtx")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_runs_bundles_for_onnxruntime_and_registers_once(half: Path, plugin: SimulatedRtx, tmp_path: Path) -> None:
    options: Any = {"max_new_tokens": 16, "ignore_eos": True, "num_speculative_tokens": K}
    with specrt.load(half, threads=1) as runtime:
        assert runtime.backend == "onnxruntime", "never the default"
        expected = runtime.generate(PROMPT, **options).token_ids
    with specrt.load(half, backend="onnxruntime-rtx") as runtime:
        assert (runtime.backend, runtime.device) == ("onnxruntime-rtx", "cuda")
        assert runtime.generate(PROMPT, **options).token_ids == expected
    assert plugin.registered == [(f"specrt.{CPU}", str(tmp_path / "provider.so"))]
    assert all(session.is_strict for session in plugin.sessions)


def test_a_provider_that_rounds_by_the_number_of_rows_is_refused(
    half: Path, plugin: SimulatedRtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one logit is enough, in passes of two rows or more. ONNX Runtime's own providers are not tested."""
    run = SimulatedSession.run_with_iobinding

    def rounds(self: SimulatedSession, io: Any, options: Any) -> None:
        run(self, io, options)
        logits = next((o for o in self.get_outputs() if o.name == LOGITS), None)
        if logits is not None:
            plugin.cuda.enqueue(lambda: nudge(io))

    def nudge(io: Any) -> None:
        row = io.real.get_outputs()[0].numpy()
        if len(row) == 3:
            row[0, 5] = np.nextafter(row[0, 5], np.float32(np.inf))

    monkeypatch.setattr(SimulatedSession, "run_with_iobinding", rounds)
    assert "the bits of a row differ between passes of 2 and of 3 tokens" in refusal(half)


def test_logits_far_from_the_torch_model_are_refused(
    half: Path, plugin: SimulatedRtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.engines.manifest.LOGITS_TOLERANCE", {"float16": 1e-9})
    assert "passes of 1 tokens are " in refusal(half)


def test_the_widths_are_tested_for_this_backend_only(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OrtBinding.run

    def rounds(self: OrtBinding, width: int, rows: int) -> None:
        run(self, width, rows)
        if LOGITS in self.host and rows == 3:
            self.host[LOGITS][:] += 1

    monkeypatch.setattr(OrtBinding, "run", rounds)
    specrt.load(half, threads=1).close()


def test_a_gpu_that_the_provider_does_not_take_is_named(half: Path, plugin: SimulatedRtx) -> None:
    plugin.has_device = False
    assert "found no GPU that it runs on, expected compute capability 8.6, 8.9, or 12.0 or later" in refusal(half)


def test_without_its_package_the_error_names_it_and_the_exit_code_is_9(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rtx, "_PACKAGE", "no_such_package_of_nvidia")
    monkeypatch.setattr(rtx, "find_devices", functools.cache(rtx.find_devices.__wrapped__))
    assert "its provider is not installed (No module named 'no_such_package_of_nvidia'); pip uninstall" in refusal(half)
    result = invoke("generate", half, "--backend", "onnxruntime-rtx", "--prompt", "x")
    assert "backend onnxruntime-rtx: its provider is not installed" in one_error_line(result)
    assert result.exit_code == 9


def test_a_library_that_is_no_provider_is_refused(half: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the real ONNX Runtime."""
    monkeypatch.setattr(rtx, "find_devices", functools.cache(rtx.find_devices.__wrapped__))
    monkeypatch.setenv(rtx.LIBRARY_VARIABLE, str(tmp_path / "gone.so"))
    assert "gone.so, which is no file; correct it" in refusal(half)
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv(rtx.LIBRARY_VARIABLE, str(tmp_path / "text.so"))
    assert f"cannot load {tmp_path / 'text.so'} (" in refusal(half)


def test_an_onnxruntime_without_plugins_is_refused(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "find_devices", functools.cache(rtx.find_devices.__wrapped__))
    monkeypatch.setattr(rtx, "ort", SimpleNamespace(__version__="1.22.0"))
    assert "onnxruntime 1.22.0 takes no plugin providers, expected 1.24 or later" in refusal(half)


def test_options_of_a_session(half: Path) -> None:
    """Names as in the plugin's tensorrt_rtx_provider_options.h, 0.5.0; every input has its three shapes."""
    contract = model_contract(manifest_from_bundle(half).target.spec)
    options = rtx.provider_options(contract, 4242)
    assert options["has_user_compute_stream"] == options["nv_persistent_context_memory"] == "1"
    assert options["user_compute_stream"] == "4242"
    for name, width, rows in (("min", 1, 1), ("opt", K + 1, K + 1), ("max", 32, K + 1)):
        shapes = dict(item.split(":") for item in options[f"nv_profile_{name}_shapes"].split(","))
        assert shapes.keys() == {tensor.name for tensor in contract.inputs}
        assert (shapes["input_ids"], shapes["row_indices"]) == (f"1x{width}", str(rows))
        assert shapes["past_key.0"] == f"1x2x{96 + K}x16"
