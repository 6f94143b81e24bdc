"""What ``specrt warm`` runs: afterwards no text has the library compile anything."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import specrt
from specrt.runtime import warming
from specrt.tools.cli import main
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import PROMPT, SEEN, WAYS, generated


@pytest.fixture
def simulated(noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / "bundle")), "tensorrt-rtx", monkeypatch)


def warm(bundle: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["warm", str(bundle), *arguments])


def compiled(simulated: SimulatedGpu, ways: Sequence[dict[str, Any]]) -> list[str]:
    """What is compiled in texts of a new process, after prompts of several lengths."""
    gc.collect()
    simulated.library.compiled.clear()
    with simulated.open() as runtime:
        for length, way in enumerate(ways):
            generated(runtime, (3 * runtime.codec.encode(PROMPT))[length : 2 * length + 1], **way)
    return simulated.library.compiled


def test_nothing_is_compiled_after_it(simulated: SimulatedGpu) -> None:
    result = warm(simulated.bundle, "--backend", "tensorrt-rtx")
    assert result.exit_code == 0, result.output
    path = simulated.bundle / "engines" / "tensorrt-rtx" / "runtime.cache"
    assert result.stdout == f"{path}: {path.stat().st_size / 1e6:.1f} MB of kernels for this GPU\n"
    assert set(json.loads(path.read_bytes())) == set(simulated.library.compiled) != set()
    before = path.stat().st_mtime_ns
    assert compiled(simulated, [{}, *WAYS.values(), *SEEN.values()]) == []
    assert path.stat().st_mtime_ns == before


def test_a_size_that_is_left_out_is_noticed(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without passes of two rows at the end of a prompt."""
    sizes = warming.sizes_of_verification
    monkeypatch.setattr(warming, "sizes_of_verification", lambda k: [size for size in sizes(k) if size != (3, 2)])
    assert warm(simulated.bundle, "--backend", "tensorrt-rtx").exit_code == 0
    assert any("target/model.onnx" in kernels for kernels in compiled(simulated, [WAYS["reproducible"]] * 3))


def test_a_text_is_the_same_after_it(simulated: SimulatedGpu) -> None:
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["block"])
    with specrt.load(simulated.bundle, backend="tensorrt-rtx", warm=True) as runtime:
        assert runtime.num_idle_slots == 1
        assert generated(runtime, **WAYS["block"]) == expected


def test_a_cache_that_cannot_be_written_is_an_error(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("specrt.engines.trt.runtime_cache.os.replace", fails)
    with pytest.warns(UserWarning, match=r"runtime.cache: cannot be written"):
        result = warm(simulated.bundle, "--backend", "tensorrt-rtx")
    assert result.exit_code == 8 and "runtime.cache: not written" in result.stderr


def test_other_backends_have_nothing_to_warm(tiny_bundle: Path) -> None:
    result = warm(tiny_bundle)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tiny_bundle}: nothing to warm, onnxruntime on cpu compiles nothing when it runs\n"


def test_a_warm_runtime_on_the_cpu_gives_the_same_text(tiny_bundle: Path) -> None:
    found = []
    for is_warm in (False, True):
        with specrt.load(tiny_bundle, threads=1, warm=is_warm) as runtime:
            assert runtime.num_idle_slots == is_warm
            ways = [{**WAYS[name], "num_speculative_tokens": 4} for name in ("greedy", "seed, filters", "block")]
            found.append([generated(runtime, **way)[:2] for way in ways])
    assert found[0] == found[1]
